"""`sublayer demo`: the table of presets, then each family built small, run once, and asked to continue a text."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .config import ModelConfig
from .generation import generate
from .models import Model, build
from .presets import preset, presets

FAMILIES = {
    "original Transformer": "original-base",
    "BERT": "bert-base",
    "GPT-2": "gpt2",
    "LLaMA": "llama-3.1-8b",
    "T5": "t5-base",
    "BART": "bart-base",
    "Marian": "opus-mt-en-de",
    "ViT": "vit-b-16",
}


def wide_console() -> Console:
    """The terminal as it is; a pipe or a log file, wide enough that no row is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def run() -> None:
    console = wide_console()
    rows = [
        {"name": name, "parameters": build(preset(name), device="meta").num_parameters(), **preset(name).to_dict()}
        for name in presets()
    ]
    preset_table(rows, console)
    console.print("\nEach family, built small from the same core and run once on this machine:\n")
    table = Table("family", "shape", "norm", "positions", "parameters", "in", "out", "forward", box=None)
    for family, name in FAMILIES.items():
        config = shrink(preset(name))
        model = build(config, seed=0).eval()
        with torch.inference_mode():
            inputs = example(config)
            model(*inputs)  # the first call pays for setting up
            start = time.perf_counter()
            out = model(*inputs)
            elapsed = time.perf_counter() - start
        shapes = " + ".join(str(tuple(x.shape)) for x in inputs)
        placement = f"{config.placement} {config.norm}"
        table.add_row(
            family, config.shape, placement, config.positions, f"{model.num_parameters():,}", shapes,
            str(tuple(out.shape)), f"{elapsed * 1e3:.1f} ms",
        )  # fmt: skip
    console.print(table)
    _show_variant(console)
    console.print("\nNext: `sublayer presets --json`, or build any of them: README.md shows how.")


def _show_variant(console: Console) -> None:
    """Every mechanism combines with every family: the proof is a variant nobody has published."""
    changes: dict[str, Any] = {"norm": "rmsnorm", "placement": "deep", "positions": "rotary"}
    model: Model = build(dataclasses.replace(shrink(preset("gpt2")), **changes), seed=0)
    ids = torch.arange(16)[None] % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    new = generate(model, ids[:, :9], max_new_tokens=7)[0].tolist()
    text = ", ".join(f"{key}={value!r}" for key, value in changes.items())
    console.print(f"\nGPT-2 with {text}, trained 60 steps on 0 1 2 3 4 5 6 0 1 …:")
    console.print(f"  {' '.join(map(str, ids[0, :9].tolist()))} [bold]{' '.join(map(str, new))}[/]  loss {loss:.4f}")


def shrink(config: ModelConfig) -> ModelConfig:
    """The same family at a size that any machine runs at once."""
    changes: dict[str, Any] = {"d_model": 256, "num_heads": 8, "d_ff": 1024, "dropout": 0.0, "attention_dropout": 0.0}
    changes |= {"num_encoder_layers": 4} if config.num_encoder_layers else {}
    changes |= {"num_decoder_layers": 4} if config.num_decoder_layers else {}
    changes |= {"vocab_size": 1000, "max_positions": 256} if config.vocab_size else {"num_labels": 10}
    changes |= {"num_kv_heads": 2} if config.num_kv_heads else {}
    changes |= {name: 0 for name in ("pad_id", "start_id", "bos_id") if getattr(config, name) is not None}
    return dataclasses.replace(config, eos_id=None, **changes)


def example(config: ModelConfig) -> tuple[Tensor, ...]:
    if config.image_input:
        return (torch.rand(4, config.num_channels, config.image_size or 0, config.image_size or 0),)
    ids = torch.randint(config.vocab_size, (4, 64))
    return (ids, ids[:, :32]) if config.shape == "encoder-decoder" else (ids,)


def preset_table(rows: list[dict[str, Any]], console: Console | None = None) -> None:
    table = Table("preset", "shape", "parameters", "layers", "d_model", "d_ff", "heads", "vocabulary", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        layers = "+".join(str(n) for n in (row["num_encoder_layers"], row["num_decoder_layers"]) if n)
        kv = row["num_kv_heads"]
        heads = f"{row['num_heads']}" if kv is None else f"{row['num_heads']}/{kv}"
        vocabulary = f"{row['vocab_size']:,}" if row["vocab_size"] else "images"
        table.add_row(
            row["name"], row["shape"], f"{row['parameters']:,}", layers, f"{row['d_model']:,}", f"{row['d_ff']:,}",
            heads, vocabulary,
        )  # fmt: skip
    (console or wide_console()).print(table)
