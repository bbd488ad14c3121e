"""A model to a folder in Hugging Face's format, written whole or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.quantized import bits_of
from ..models import Model, parse_dtype
from .families import FAMILIES
from .family import Family, canonical
from .load import OWN_TYPE
from .plan import Move, covered, moves
from .rules import Rule
from .tensors import CheckpointError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# Files of an earlier save that a new one replaces, even where their names differ.
WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")


def save_model(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write config.json and the weights so that `transformers` reads them; other files in the folder stay.

    What no public architecture can express is written in a form of our own, which `load_model` reads. `progress` is
    called with the bytes written and the bytes in all.
    """
    theirs, plan = describe(model)
    theirs |= label_names(model)
    wanted = parse_dtype(dtype)
    theirs |= {"dtype": str(wanted or model.dtype).removeprefix("torch.")}
    theirs.pop("torch_dtype", None)
    shards = _shards(model, plan, wanted, parse_size(max_shard_size))
    total = sum(_bytes(model, move, wanted) for shard in shards for move in shard)
    state, written = model.state_dict(), 0
    index: dict[str, str] = {}
    with atomic_folder(Path(folder)) as temporary:
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(state, shard, wanted, temporary / name)
            index |= {move.stored: name for move in shard}
            written += sum(_bytes(model, move, wanted) for move in shard)
            if progress is not None:
                progress(written, total)
        if len(shards) > 1:
            write_json(
                temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
            )
        write_json(temporary / "config.json", theirs)
        generation = _generation_config(model)
        if generation:
            write_json(temporary / "generation_config.json", generation)


def label_names(model: Model) -> dict[str, Any]:
    """What config.json calls the classes of a classifier, where the model has names for them."""
    if not model.labels:
        return {}
    ours = dict(enumerate(model.labels))
    return {"id2label": {str(n): name for n, name in ours.items()}, "label2id": {name: n for n, name in ours.items()}}


def describe(model: Model, *, tied: bool = False) -> tuple[dict[str, Any], list[Move]]:
    """config.json for a model, and its tensors under the names they get on disk; a tied output matrix if asked for."""
    if bits_of(model) is not None:
        raise ValueError(
            f"the model's weights are in {bits_of(model)} bits; save its adapter alone (sublayer.lora.save), or merge "
            "that into the original (sublayer convert MODEL OUT --merge ADAPTER)"
        )
    if any(".lora." in name for name in model.state_dict()):
        raise ValueError(
            "the model has adapters; merge them first (sublayer.lora.merge), or save them alone (sublayer.lora.save)"
        )
    origin = model.origin or {}
    kind = origin.get("model_type")
    first = [FAMILIES[kind]] if kind in FAMILIES else []
    for family in [*first, *FAMILIES.values()]:
        theirs = _config_of(family, model, origin)
        if theirs is not None:
            plan = moves(family, model, bare=model.config.head == "none", tied=tied)
            covered(model, plan)
            return theirs, plan
    config = {"model_type": OWN_TYPE, "architectures": ["SublayerModel"], "sublayer": model.config.to_dict()}
    state = model.state_dict(keep_vars=True)
    names = list(state) if tied else list({id(tensor): name for name, tensor in state.items()}.values())
    return config, [Move(name, Rule(name, (name,))) for name in names]


def _config_of(family: Family, model: Model, origin: dict[str, Any]) -> dict[str, Any] | None:
    """What the model came with, where that still describes it; else what the family's tables say."""
    theirs = family.write_config(model.config)
    if theirs is None or origin.get("model_type") != family.model_type:
        return theirs
    try:
        before = family.read_config(origin, theirs["architectures"][0])
    except CheckpointError:
        return theirs
    if canonical(before) == canonical(model.config) and origin.get("architectures") == theirs["architectures"]:
        return dict(origin)
    kept = {key: value for key, value in origin.items() if key not in ("rope_scaling", "rope_parameters", "rope_theta")}
    return kept | theirs


def _generation_config(model: Model) -> dict[str, Any]:
    config = model.config
    if config.head != "lm":
        return {}
    ids = {
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "decoder_start_token_id": config.start_id if config.shape == "encoder-decoder" else None,
    }
    return model.generation | {key: value for key, value in ids.items() if value is not None}


def _stored(state: dict[str, Tensor], move: Move, dtype: torch.dtype | None) -> Tensor:
    tensor = move.rule.op.save([state[name] for name in move.rule.ours])
    return tensor.detach().to(dtype or tensor.dtype)


def _bytes(model: Model, move: Move, dtype: torch.dtype | None) -> int:
    state = model.state_dict()
    parts = [state[name] for name in move.rule.ours]
    return sum(part.numel() for part in parts) * (dtype or parts[0].dtype).itemsize


def _shards(model: Model, plan: list[Move], dtype: torch.dtype | None, limit: int) -> list[list[Move]]:
    """In order, each as full as the limit allows; a tensor larger than the limit gets a shard of its own."""
    shards: list[list[Move]] = [[]]
    size = 0
    for move in plan:
        step = _bytes(model, move, dtype)
        if shards[-1] and size + step > limit:
            shards.append([])
            size = 0
        shards[-1].append(move)
        size += step
    return shards


def _write_shard(state: dict[str, Tensor], shard: list[Move], dtype: torch.dtype | None, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {move.stored: _stored(state, move, dtype).to("cpu").contiguous() for move in shard}
    save_file(tensors, path, metadata={"format": "pt"})


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_size(size: int | str) -> int:
    """Bytes, or a number with a unit: 5GB, 500MB, 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size is {size!r}; expected a number of bytes, or one with a unit such as 5GB")
    return int(float(match[1]) * UNITS[match[2] or ""])


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` in one step, at the end and only if all went well.

    Files of the old folder that the new one does not have are kept, except the weights.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder to save into")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        temporary.chmod(0o777 & ~_umask())
        if folder.exists():
            _keep_others(folder, temporary)
            _exchange(temporary, folder)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _keep_others(old: Path, new: Path) -> None:
    for item in old.iterdir():
        if (new / item.name).exists() or WEIGHTS.fullmatch(item.name):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders. Linux does it in one step (renameat2 with RENAME_EXCHANGE); elsewhere it takes two renames."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2
    if rename is not None and rename(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(new.name + ".old")
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
