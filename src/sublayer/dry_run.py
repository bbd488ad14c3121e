"""`--dry-run`: what a run would need, without running it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import torch

from .inspection.plan import STATES
from .start import Start
from .train import Run, device_name, make_trainer, prepare
from .training.distributed import join
from .training.memory import keep_memory
from .training.meter import peak_memory
from .training.progress import duration, in_bytes
from .training.recipe import Recipe
from .training.select import trainable


def describe(recipe: Recipe, folder: Path, start: Start | None = None) -> int:
    """`--dry-run`: sizes, and memory and time as a few real steps show them. Nothing is written to the run's folder."""
    world = join(recipe.train.device, recipe.train.parallel)
    if recipe.train.keep_memory and world.device.type == "cpu":
        keep_memory()
    run = prepare(recipe, folder, world, start=start)
    config, settings = run.model.config, run.recipe.train
    count, trained = run.model.num_parameters(), trainable(run.model)
    per = len(run.loader.plan(0))
    states = STATES[settings.optimizer] + (4 if settings.ema else 0)
    fixed = count * run.model.dtype.itemsize + trained * (4 + states)
    print(f"model      {config.shape}, d_model {config.d_model}, {count:,} parameters")
    if trained < count:
        print(f"trained    {trained:,} of them, {trained / count:.2%}")
    if run.context.vocabulary is not None:
        print(f"tokenizer  {run.context.vocabulary.size:,} tokens")
    print(f"data       {len(run.loader.items):,} examples, {run.store.info['tokens']:,} tokens")
    print(f"steps      {settings.steps:,} of {settings.batch_tokens:,} tokens: {settings.steps / per:.2f} epochs")
    print(f"weights    {in_bytes(fixed)} with gradients and {settings.optimizer}'s state", flush=True)
    seconds, memory = measure(run)
    total = seconds * settings.steps
    print(f"memory     {in_bytes(memory)} at the peak, measured over three steps on {device_name(world)}")
    print(f"time       {duration(total)} for {settings.steps:,} steps, {seconds:.3f} s each, without evaluations")
    return 0


def measure(run: Run) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(dataclasses.replace(run, folder=Path(folder)), quiet=True)
        trainer.journal.start(trainer.state)
        times = []
        for _, step in zip(range(4), run.loader.steps(), strict=False):
            begun = time.perf_counter()
            trainer.learn(step)
            if run.world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    return sorted(times[1:])[1], peak_memory(run.world.device)
