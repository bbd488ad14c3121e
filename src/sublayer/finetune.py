"""`sublayer finetune`: a trained model and data of one's own, to an adapter or a whole model."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .data.columns import columns_of
from .data.tasks import TASKS
from .finetune_columns import choose
from .finetune_start import Tuned
from .hub import load_model
from .hub.download import resolve
from .hub.tokenizer import load_tokenizer
from .train import exit_code, train
from .training.meter import peak_memory, usual_dtype
from .training.progress import duration, in_bytes
from .training.recipe import Recipe, change, make_recipe, read_values
from .training.select import trainable
from .training.trainer import Trainer

# What differs from training from scratch, unless the recipe says otherwise.
USUAL: dict[str, Any] = dict(
    epochs=3.0, schedule="linear", warmup=0.06, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01,
    eval_every=0, eval_first=True, eval_tokens="none",
)  # fmt: skip
RATES = {"full": 5e-5, "lora": 5e-4}
LENGTHS = {"chat": 1024, "prompt-completion": 1024, "causal": 512}  # tokens of an example; 256 of the others
PICTURES = 32  # in a step


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the command line says beside key=value pairs; None leaves it to the recipe, or to the usual."""

    data: str | None = None
    valid: str | None = None
    objective: str | None = None
    full: bool = False
    rank: int | None = None
    bits: int | None = None


def main(
    model: str, changes: Sequence[str], choices: Choices, out: str | None, *, resume: bool, dry_run: bool, quiet: bool
) -> int:
    quiet = quiet or int(os.environ.get("RANK", 0)) > 0
    recipe, chosen = plan(model, changes, choices)
    folder = Path(out or f"runs/{_stem(recipe)}")
    _say(chosen, quiet)
    start = Tuned(recipe, lambda text: _say(text, quiet))
    if dry_run:
        from .dry_run import describe

        return describe(recipe, folder, start)
    begun = time.perf_counter()
    trainer = train(recipe, folder, start=start, resume=resume, quiet=quiet)
    if not trainer.stopped_by and trainer.world.main:
        facts = summary(recipe, trainer, folder, time.perf_counter() - begun)
        (folder / "summary.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for line in tell(facts, recipe, folder):
            _say(line, quiet)
    return exit_code(trainer)


def plan(model: str, changes: Sequence[str], choices: Choices) -> tuple[Recipe, str]:
    """The whole recipe of a run from a model, or a recipe's file; and what was chosen, in one line."""
    is_recipe = model.endswith(".toml")
    where = model if is_recipe else "the command line"
    values: dict[str, Any] = read_values(Path(model)) if is_recipe else {"model": {"path": model}, "lora": {}}
    asked = [change.partition(".")[0] for change in changes]
    values = change(values, changes, where)
    _check_sections(values, where)
    data, settings = values.setdefault("data", {}), values.setdefault("train", {})
    given = {"train": choices.data, "valid": choices.valid, "objective": choices.objective}
    data |= {key: value for key, value in given.items() if value is not None}
    if "path" not in values.get("model", {}):
        raise ValueError(f"{where} names no model to begin with; give model.path=FOLDER")
    if "train" not in data:
        raise ValueError("there is no data to learn from; give --data FILE")
    adapter = {key: n for key, n in (("rank", choices.rank), ("bits", choices.bits)) if n is not None}
    if choices.full:
        if "lora" in asked or adapter:
            raise ValueError("--full trains all weights, and the lora settings are for an adapter; give one of them")
        values.pop("lora", None)
    elif adapter:
        values["lora"] = values.get("lora", {}) | adapter
    chosen = _objective(values, data)
    _fill(values, data, settings)
    recipe = make_recipe(values, where)
    method = "all weights learn" if recipe.lora is None else f"LoRA of rank {recipe.lora.rank}"
    if recipe.lora is not None and recipe.lora.bits is not None:
        method += f", beside weights in {recipe.lora.bits} bits"
    return recipe, f"{chosen}; {method}; products in {recipe.train.dtype}"


def _check_sections(values: dict[str, Any], where: str) -> None:
    for section, content in values.items():
        if not isinstance(content, dict):
            raise ValueError(f"{where}: {section} must be a section, [{section}]")


def _objective(values: dict[str, Any], data: dict[str, Any]) -> str:
    if "objective" in data:
        return f"objective: {data['objective']}, as asked for"
    path = resolve(values["model"]["path"])
    config = load_model(path, "meta").config
    tokenizer = None if config.image_input else load_tokenizer(path)
    where = data["train"] if isinstance(data["train"], str) else ", ".join(data["train"])
    columns = columns_of(data["train"], data.get("names"))
    settings, chosen = choose(config, columns, data, tokenizer, where)
    data |= settings
    return chosen


def _fill(values: dict[str, Any], data: dict[str, Any], settings: dict[str, Any]) -> None:
    """What a fine-tuning run usually wants, in the places that are still empty."""
    usual = USUAL | {"lr": RATES["full" if "lora" not in values else "lora"]}
    usual["dtype"] = usual_dtype(torch.cuda.is_available() and settings.get("device") != "cpu")
    if "steps" in settings:
        usual.pop("epochs")
    if data["objective"] == "classify-image":
        usual["batch_tokens"] = PICTURES
    elif data["objective"] in TASKS and "max_length" not in data:
        room = load_model(values["model"]["path"], "meta").config.max_positions
        data["max_length"] = min(LENGTHS.get(data["objective"], 256), room)
    values["train"] = usual | settings


def summary(recipe: Recipe, trainer: Trainer, folder: Path, seconds: float) -> dict[str, Any]:
    """What was trained, what it took, and what it is worth, for the screen and for other programs."""
    model, learned = trainer.model, trainable(trainer.model)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [line for line in lines if "valid_loss" in line]
    after = evaluations[-1:]
    if trainer.settings.keeps_best and evaluations:
        after = [line for line in evaluations if line[trainer.settings.judge] == trainer.state.best][:1]
    return {
        "objective": recipe.data.objective,
        "method": "full" if recipe.lora is None else "lora",
        "trainable": learned,
        "parameters": model.num_parameters(),
        "share": learned / model.num_parameters(),
        "peak_memory_bytes": int(peak_memory(trainer.device)),
        "steps": trainer.state.step,
        "seconds": round(seconds, 2),
        "training_seconds": trainer.state.seconds,
        "before": next((_metrics(line) for line in evaluations if line["step"] == 0), None),
        "after": next((_metrics(line) for line in after), None),
        "size_bytes": sum(file.stat().st_size for file in (folder / "model").rglob("*") if file.is_file()),
    }


def _metrics(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step"}


def tell(facts: dict[str, Any], recipe: Recipe, folder: Path) -> list[str]:
    lines = [f"learned    {facts['trainable']:,} of {facts['parameters']:,} parameters ({facts['share']:.2%})"]
    shown = dict(facts["after"] or {})
    if TASKS[recipe.data.objective].head not in ("lm", "mlm"):
        shown.pop("valid_perplexity", None)
    for name, value in shown.items():
        before = f"{facts['before'][name]:.4g} before, " if facts["before"] else ""
        lines.append(f"{name.replace('valid_', ''):<10} {before}{value:.4g} after")
    took = f"{duration(facts['seconds'])} in all, {in_bytes(facts['peak_memory_bytes'])} of memory at the peak"
    lines.append(f"took       {facts['steps']:,} steps, {took}")
    what = "the whole model" if recipe.lora is None else "the adapter"
    lines.append(f"on disk    {what} {folder / 'model'}, {facts['size_bytes'] / 1e6:.1f} MB")
    lines.append(f"try        {_next(recipe, folder / 'model')}")
    if recipe.lora is not None:
        lines.append(f"or merge   sublayer convert {recipe.model['path']} OUT --merge {folder / 'model'}")
    return lines


def _next(recipe: Recipe, model: Path) -> str:
    """The first thing to do with the result."""
    if recipe.data.objective == "chat":
        return f"sublayer generate {model} --chat"
    if TASKS[recipe.data.objective].head == "lm":
        return f"sublayer generate {model} 'TEXT'"
    if recipe.data.objective == "classify-sequence":
        return f"sublayer evaluate {model} --data FILE"
    return f"sublayer.load({str(model)!r}) in Python"


def _stem(recipe: Recipe) -> str:
    where = recipe.data.train
    return Path(where if isinstance(where, str) else (where or ("finetune",))[0]).name.partition(".")[0] or "finetune"


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
