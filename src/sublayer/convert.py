"""`sublayer convert`: read a checkpoint, write it in another form, and say what was done."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from . import lora
from .config import unknown
from .data import Tokenizer
from .data.tokenizer import FILES
from .hub import load_model, save_model
from .hub.download import resolve
from .hub.heads import under_head_of
from .hub.save import describe
from .models import Model, parse_dtype

GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def convert(
    source: str,
    target: str,
    to: str | None,
    dtype: str | None,
    max_shard_size: str,
    *,
    merge: str | None = None,
    as_json: bool = False,
) -> None:
    to = to or ("gguf" if target.endswith(".gguf") else "hf")
    path, out = resolve(source), Path(target)
    if out.resolve() == path.resolve():
        raise ValueError(f"{target} is the source itself; give another place to write to")
    _check_dtype(to, dtype)
    start = time.perf_counter()
    # GGUF packs its own types; a folder is written in the dtype asked for.
    model = load_model(path, device="cpu")
    if merge is not None:
        model = under_head_of(model, Path(merge))
        lora.load(model, merge)
        lora.merge(model, keep=False)
    if to == "gguf":
        _write_gguf(model, path, out, dtype)
    else:
        _write_folder(model, path, out, dtype, max_shard_size)
    _summary(model, path, out, to, time.perf_counter() - start, as_json)


def _check_dtype(to: str, dtype: str | None) -> None:
    if to == "gguf" and dtype is not None and dtype not in GGUF_TYPES:
        raise ValueError(unknown("GGUF dtype", dtype, tuple(GGUF_TYPES)))
    if to == "hf":
        parse_dtype(dtype)


def _write_gguf(model: Model, path: Path, out: Path, dtype: str | None) -> None:
    from .hub.gguf_write import write_gguf

    name = dtype or str(model.dtype).removeprefix("torch.")
    tokenizer = path / "tokenizer.json"
    write_gguf(model, out, dtype=GGUF_TYPES[name], tokenizer_json=tokenizer if tokenizer.exists() else None)


def _write_folder(model: Model, path: Path, out: Path, dtype: str | None, max_shard_size: str) -> None:
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("write", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        save_model(model, out, dtype=dtype, max_shard_size=max_shard_size, progress=progress)
    if path.suffix == ".gguf":
        from .hub.gguf import read_gguf
        from .hub.gguf_tokenizer import tokenizer_from_gguf

        Tokenizer(tokenizer_from_gguf(read_gguf(path).metadata)).save(out)
    elif any((path / name).exists() for name in (*FILES, "vocab.txt", "vocab.json")):
        Tokenizer.load(path).save(out)


def _summary(model: Model, path: Path, out: Path, to: str, seconds: float, as_json: bool) -> None:
    theirs, plan = describe(model)
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    facts: dict[str, Any] = {
        "source": str(path),
        "target": str(out),
        "architecture": theirs["architectures"][0],
        "parameters": model.num_parameters(),
        "tensors": len(plan),
        "renamed": sum(move.stored not in move.rule.ours for move in plan),
        "files": {file.name: file.stat().st_size for file in files if file.is_file()},
        "seconds": round(seconds, 2),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(f"read     {facts['architecture']} from {path}: {facts['parameters']:,} parameters in {len(plan)} tensors")
    print(f"renamed  {facts['renamed']} tensors between their names and ours, both ways by the same rules")
    size = sum(facts["files"].values())
    print(f"wrote    {to} to {out}: {', '.join(facts['files'])} ({size / 1e6:,.1f} MB) in {seconds:.1f} s")
