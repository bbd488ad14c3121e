"""`sublayer train`: a recipe, from its data to a folder with the trained model."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .core.attention import Attention
from .data import Tokenizer
from .data.batches import Loader
from .data.items import make_items
from .data.sources import open_source, open_store
from .data.store import Store
from .data.tasks import TASKS, Context, Labels
from .evaluate import Evaluator
from .models import Model
from .start import Fresh, Start
from .training.checkpoint import average_models, checkpoints
from .training.distributed import World, join, whole
from .training.memory import keep_memory
from .training.progress import duration
from .training.recipe import SECTIONS, Recipe, find_recipe, load_recipe
from .training.report import Report, write_report
from .training.select import freeze
from .training.trainer import Trainer

# Settings that may differ when a run is resumed: they change when things are written, or how long it goes on.
FREE = {
    "steps", "save_every", "eval_every", "log_every", "keep", "average", "eval_samples", "patience", "device",
    "keep_memory", "tensorboard", "max_skips", "micro_tokens", "compile", "parallel", "epochs",
}  # fmt: skip


SHORT = 512  # tokens of sequences that share the rows of a packed batch
# Every token has its own label, or none.
TOKEN_OBJECTIVES = (
    "sequence-to-sequence", "causal", "masked", "span-corruption", "denoising", "classify-tokens", "prompt-completion",
    "chat",
)  # fmt: skip


@dataclass
class Run:
    """Everything a recipe asks for, opened and built."""

    recipe: Recipe
    folder: Path
    world: World
    start: Start
    context: Context
    store: Store
    model: Model
    loader: Loader
    evaluator: Evaluator | None
    tokenizer: Tokenizer | None

    def save(self, model: Model, folder: Path) -> None:
        self.start.save(model, folder)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)

    def load(self, folder: Path) -> Model:
        return self.start.load(folder, self.context, self.world.device)


def main(
    name: str, changes: Sequence[str], out: str | None, *, resume: bool, dry_run: bool, quiet: bool = False
) -> int:
    recipe = load_recipe(find_recipe(name), changes)
    folder = Path(out or f"runs/{Path(name).stem}")
    if dry_run:
        from .dry_run import describe

        return describe(recipe, folder)
    return exit_code(train(recipe, folder, resume=resume, quiet=quiet))


def exit_code(trainer: Trainer) -> int:
    if trainer.stopped_by:
        _say(f"stopped by {trainer.stopped_by} at step {trainer.state.step}; the same command with --resume goes on")
        return 128 + (2 if trainer.stopped_by == "SIGINT" else 15)
    return 0


def train(
    recipe: Recipe, folder: Path, *, start: Start | None = None, resume: bool = False, quiet: bool = False
) -> Trainer:
    """Train as the recipe says, from fresh weights unless told where to start; the model is then in `folder`/model."""
    begun = time.perf_counter()
    world = join(recipe.train.device, recipe.train.parallel)
    _check_folder(recipe, folder, resume)
    if recipe.train.keep_memory and world.device.type == "cpu":
        keep_memory()
    run = prepare(recipe, folder, world, quiet, resume, start)
    trainer = make_trainer(run, quiet)
    if resume and trainer.resume() and world.main:
        _say(f"going on from step {trainer.state.step}", quiet)
    if world.main:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "recipe.toml", run.recipe.to_toml())
        if run.tokenizer is not None:
            run.tokenizer.save(folder / "tokenizer")
    trainer.run()
    if not trainer.stopped_by:
        _finish(run, trainer)
        if world.main:
            _say(f"{folder / 'model'} is trained: {duration(time.perf_counter() - begun)} in all", quiet)
    return trainer


def prepare(
    recipe: Recipe, folder: Path, world: World, quiet: bool = False, resume: bool = False, start: Start | None = None
) -> Run:
    """Data, tokenizer and model of a recipe. One process makes what is made once; the others wait and then find it.

    A run that goes on keeps the tokenizer it began with, whatever has become of the cache.
    """
    if not world.main:
        world.wait()
    start = start or Fresh(recipe)
    source = open_source(recipe.data, "train")
    if source is None:
        raise ValueError("the recipe names no training data; give data.train=FILE, or data.corpus")

    def say(text: str) -> None:
        _say(text, quiet or not world.main)

    tokenizer = None
    if TASKS[recipe.data.objective].texts:
        begun = resume and (folder / "tokenizer").is_dir()
        tokenizer = Tokenizer.load(folder / "tokenizer") if begun else start.tokenizer(source, say)
    vocabulary = None if tokenizer is None else start.vocabulary(tokenizer)
    context = Context(vocabulary, recipe.data, Labels(), start.image_shape)
    store = open_store(source, context, say)
    held_out = open_source(recipe.data, "valid")
    valid = None if held_out is None else open_store(held_out, context, say)
    if world.main:
        world.wait()
    model = start.model(context, world.device)
    freeze(model, recipe.train.freeze)
    packed = _packed(recipe, model, world.device)
    loader = Loader(
        items=make_items(store, context), batch_tokens=recipe.train.batch_tokens,
        micro_tokens=recipe.train.micro_tokens, seed=recipe.train.seed, group=recipe.data.group_by_length,
        packed=packed, pad=model.config.pad_id or 0,
        bound=recipe.data.max_length if packed else None, rank=world.rank, world=world.size,
    )  # fmt: skip
    if loader.packed:
        loader = dataclasses.replace(loader, rows=_rows(recipe, store)).of_one_shape()
    recipe = _with_steps(recipe, loader)
    evaluator = None
    if valid is not None:
        items = make_items(valid, context)
        evaluator = Evaluator(
            dataclasses.replace(loader, items=items, limit=recipe.train.eval_tokens), recipe, context, world, tokenizer
        )
    return Run(recipe, folder, world, start, context, store, model, loader, evaluator, tokenizer)


def _with_steps(recipe: Recipe, loader: Loader) -> Recipe:
    """Epochs in steps, as far as the recipe speaks of epochs."""
    settings = recipe.train
    if settings.epochs is None and settings.eval_every != 0:
        return recipe
    one = len(loader.plan(0))
    steps = settings.steps if settings.epochs is None else max(1, round(settings.epochs * one))
    every = one if settings.eval_every == 0 else settings.eval_every
    return dataclasses.replace(recipe, train=dataclasses.replace(settings, steps=steps, eval_every=every))


def _class_weights(run: Run) -> Sequence[float] | None:
    """As the recipe gives them; balanced, every class weighs as much as any other in all, and the mean weight is 1."""
    wanted = run.recipe.train.class_weights
    if wanted is None:
        return None
    name = next((name for name in ("label", "tags") if name in run.store.columns), None)
    count = len(run.context.labels.sorted())
    if name is None:
        raise ValueError(f"train.class_weights needs labels, and {run.recipe.data.objective!r} has none")
    if isinstance(wanted, tuple):
        if len(wanted) != count:
            raise ValueError(f"train.class_weights has {len(wanted)} numbers for {count} labels")
        return wanted
    labels = run.context.labels.order()[run.store.columns[name]]
    counts = np.bincount(labels, minlength=count)
    return (len(labels) / (count * np.maximum(counts, 1))).tolist()


def _packed(recipe: Recipe, model: Model, device: torch.device) -> bool:
    """Packed where a kernel reads packed sequences as they are; a span's ends are places in a padded row."""
    if recipe.data.objective not in TOKEN_OBJECTIVES:
        return False
    if recipe.data.layout != "auto":
        return recipe.data.layout == "packed"
    drops = any(part.dropout for part in model.modules() if isinstance(part, Attention))
    return device.type == "cuda" and not (drops and recipe.data.max_length > SHORT)  # the kernel for long ones does not


def _rows(recipe: Recipe, store: Store) -> dict[str, int] | None:
    """Tokens of a row that short sequences share, each input in proportion to its mean length; None for long ones."""
    longest = recipe.data.max_length
    if longest > SHORT or recipe.data.objective not in TOKEN_OBJECTIVES:
        return None
    if recipe.data.objective != "sequence-to-sequence":
        sides = {"ids"} if TASKS[recipe.data.objective].shapes != ("encoder-decoder",) else {"source", "target"}
        return dict.fromkeys(sides, -(-(longest + 16) // 64) * 64)  # masks between words make a source longer
    means = {name: float(np.minimum(store.lengths(name) + 1, longest).mean()) for name in ("source", "target")}
    room = max(longest, 128)
    return {name: -(-int(room * mean / min(means.values())) // 16) * 16 for name, mean in means.items()}


def make_trainer(run: Run, quiet: bool) -> Trainer:
    trainer: Trainer

    def report(status: str) -> None:
        if run.world.main:
            write_report(run.folder, _report(run, trainer, status))

    trainer = Trainer(
        run.model, run.loader, run.recipe.train, run.folder, save_model=run.save, load_model=run.load,
        evaluate=run.evaluator, report=report, world=run.world, class_weights=_class_weights(run), quiet=quiet,
    )  # fmt: skip
    return trainer


def _report(run: Run, trainer: Trainer, status: str) -> Report:
    config, settings = run.model.config, run.recipe.train
    facts = [
        ("model", f"{config.shape}, {run.model.num_parameters():,} parameters"),
        ("objective", run.recipe.data.objective),
        ("examples", f"{len(run.loader.items):,}"),
        ("tokens a step", f"{settings.batch_tokens:,}"),
        ("optimiser", f"{settings.optimizer}, {settings.schedule}"),
        ("arithmetic", f"{settings.dtype} on {device_name(run.world)}"),
        ("processes", str(run.world.size)),
        ("time", duration(trainer.state.seconds)),
    ]
    if trainer.state.skipped:
        facts.append(("steps skipped", str(trainer.state.skipped)))
    evaluator = run.evaluator
    return Report(
        title=run.folder.resolve().name, status=status, facts=facts,
        samples=evaluator.samples if evaluator is not None else [],
        attention=evaluator.attention if evaluator is not None else [], recipe=run.recipe.to_toml(),
        notes=trainer.state.notes,
    )  # fmt: skip


def device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"{torch.get_num_threads()} CPU threads"


def _finish(run: Run, trainer: Trainer) -> None:
    """Choose the weights, write DIR/model, and the report with pictures."""
    settings, best = run.recipe.train, run.folder / "best"
    model = run.model
    with trainer.averaged():
        if settings.keeps_best and best.exists() and not run.world.sharded:
            model.load_state_dict(run.load(best).state_dict())
        elif settings.average > 1 and not run.world.sharded:
            kept = checkpoints(run.folder / "checkpoints")[-settings.average :]
            states = [run.load(path).state_dict() for path in kept]
            model.load_state_dict(average_models(states))
        if run.world.sharded:
            state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
            model = run.start.model(run.context, run.world.device)
            model.load_state_dict(state)
        model.eval()
        _test(run, trainer, model)
        if run.world.main:
            run.save(model, run.folder / "model")
            if run.evaluator is not None:
                run.evaluator.picture(model)
            write_report(run.folder, _report(run, trainer, trainer.status))
    run.world.wait()


def _test(run: Run, trainer: Trainer, model: Model) -> None:
    """The trained model on data.test, all of it, where that is given."""
    source = open_source(run.recipe.data, "test") if run.recipe.data.test is not None else None
    if source is None:
        return
    loader = dataclasses.replace(run.loader, items=make_items(open_store(source, run.context, _say), run.context))
    everything = dataclasses.replace(
        run.recipe, train=dataclasses.replace(run.recipe.train, eval_samples=len(loader.items))
    )
    metrics = Evaluator(loader, everything, run.context, run.world, run.tokenizer)(model, trainer.state.step)
    metrics = {name.replace("valid", "test"): value for name, value in metrics.items()}
    metrics = {name if name.startswith("test") else f"test_{name}": value for name, value in metrics.items()}
    trainer.journal.write(trainer.state, {"step": trainer.state.step, **metrics})
    if run.world.main:
        _say("test data: " + ", ".join(f"{name.replace('_', ' ')} {n:.4g}" for name, n in metrics.items()))


def _check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Never train over another run; resume only what is the same run."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give --out a folder")
    stored = folder / "recipe.toml"
    if not resume:
        if stored.exists() and checkpoints(folder / "checkpoints"):
            raise ValueError(f"{folder} already holds a run; add --resume to go on with it, or give another --out")
        return
    if not stored.exists():
        return
    before = load_recipe(stored)
    for section in SECTIONS:
        old, new = _keys(getattr(before, section)), _keys(getattr(recipe, section))
        for key in sorted({*old, *new} - (FREE if section == "train" else {"cache"})):
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"{folder} was begun with {section}.{key}={old.get(key)}, and this recipe has {new.get(key)}; "
                    "resume with the same settings, or give another --out"
                )


def _keys(section: Any) -> dict[str, Any]:
    return section or {} if section is None or isinstance(section, dict) else dataclasses.asdict(section)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _say(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
