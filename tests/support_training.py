"""Runs small enough for a test: data written to files, tiny models of every kind, and a trainer over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sublayer.config import unknown
from sublayer.train import Run, make_trainer, prepare
from sublayer.training.distributed import World
from sublayer.training.recipe import Recipe, make_recipe
from sublayer.training.trainer import Trainer

COLOURS = ("red", "green", "blue", "black", "white")
THINGS = ("house", "river", "stone", "cloud", "horse", "window")
PAIRS = [
    {"source": f"the {a} {b}" + " and so on" * (n % 3), "target": f"{b[::-1]} {a[::-1]}" + " etc" * (n % 3)}
    for n, (a, b) in enumerate((a, b) for a in COLOURS for b in THINGS)
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It was tired!",
    "A journey of a thousand miles begins with a single step.",
    "All that glitters is not gold. Not all who wander are lost.",
    "Better late than never. Actions speak louder than words.",
]
LABELLED = [{"text": f"a {a} {b} was here", "label": a} for a in COLOURS for b in THINGS]
TAGGED = [
    {"words": ["Look", a, b], "tags": ["O", "COLOUR", "THING"]}
    if n % 2
    else {"words": [b, "!"], "tags": ["THING", "O"]}
    for n, (a, b) in enumerate((a, b) for a in COLOURS for b in THINGS)
]
QUESTIONS = [
    {"question": f"which {b}?", "context": f"They saw a {a} {b} there.", "answer": a} for a in COLOURS for b in THINGS
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sequence-to-sequence": PAIRS,
    **{name: [{"text": text} for text in TEXTS] for name in ("causal", "masked", "span-corruption", "denoising")},
    "classify-sequence": LABELLED,
    "classify-tokens": TAGGED,
    "find-span": QUESTIONS,
    "prompt-completion": [{"prompt": pair["source"], "completion": pair["target"]} for pair in PAIRS],
}
PRESETS = {
    "sequence-to-sequence": "original-base", "causal": "gpt2", "masked": "bert-base", "span-corruption": "t5-small",
    "denoising": "bart-base", "classify-sequence": "bert-base", "classify-tokens": "bert-base",
    "find-span": "bert-base", "classify-image": "vit-b-16", "prompt-completion": "gpt2",
}  # fmt: skip
BERT = {"kind": "wordpiece", "pad": "[PAD]", "eos": "", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
BERT |= {"mask": "[MASK]", "template": "[CLS] $0 [SEP]"}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "sequence-to-sequence": {"template": "$0 </s>"},
    "causal": {"eos": "<|endoftext|>"},
    "prompt-completion": {"eos": "<|endoftext|>"},
    "span-corruption": {"kind": "unigram", "unk": "<unk>", "sentinels": 20, "template": "$0 </s>"},
    "denoising": {"bos": "<s>", "mask": "<mask>", "template": "<s> $0 </s>", "start": "eos"},
    **dict.fromkeys(("masked", "classify-sequence", "classify-tokens", "find-span"), BERT),
}
SIZES = {"d_model": 32, "d_ff": 64, "num_heads": 4, "dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_pictures(folder: Path, count: int = 4, size: int = 8) -> Path:
    """Noise, and a label for each picture's own folder."""
    from PIL import Image

    random = np.random.default_rng(0)
    for label in ("cat", "dog", "owl"):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 256, (size, size), np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def write_data(folder: Path, objective: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if objective == "classify-image":
        return write_pictures(folder / "pictures")
    return write_rows(folder / f"{objective}.jsonl", ROWS[objective])


def recipe_values(folder: Path, objective: str = "sequence-to-sequence", **changes: Any) -> dict[str, Any]:
    """The sections of a recipe; a change is named by section and key, such as train_steps=3."""
    data = write_data(folder, objective)
    layers = {"num_encoder_layers": 1} if PRESETS[objective] != "gpt2" else {}
    decoders = ("sequence-to-sequence", "causal", "span-corruption", "denoising", "prompt-completion")
    layers |= {"num_decoder_layers": 1} if objective in decoders else {}
    if objective == "classify-image":
        layers |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
    values: dict[str, dict[str, Any]] = {
        "model": {"preset": PRESETS[objective], **SIZES, **layers},
        "data": {"objective": objective, "train": str(data), "documents": "line", "cache": str(folder / "cache")},
        "tokenizer": {"vocab_size": 300, **TOKENIZERS.get(objective, {})},
        "train": {
            "steps": 6, "batch_tokens": 128, "lr": 3e-3, "warmup": 2, "schedule": "constant", "device": "cpu",
            "log_every": 1, "save_every": None, "keep_memory": False,
        },
    }  # fmt: skip
    values["data"]["max_length"] = 48
    for name, value in changes.items():
        section, _, key = name.partition("_")
        if section not in values:
            raise ValueError(unknown("section", section, values))
        values[section][key] = value
    return values


def recipe_of(folder: Path, objective: str = "sequence-to-sequence", **changes: Any) -> Recipe:
    values = recipe_values(folder, objective, **changes)
    return make_recipe(
        {name: {k: v if v is not None else "none" for k, v in s.items()} for name, s in values.items()}, "test"
    )


def run_of(recipe: Recipe, folder: Path) -> Run:
    return prepare(recipe, folder, World(device=torch.device("cpu")), quiet=True)


def trainer_of(recipe: Recipe, folder: Path) -> Trainer:
    return make_trainer(run_of(recipe, folder), quiet=True)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any number in them."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())
