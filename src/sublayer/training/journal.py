"""What a run has come to, and what it writes about itself while it goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batch
from ..models import Model
from ..models.flops import flops
from .distributed import World
from .meter import matrix_rate
from .progress import Progress
from .recipe import TrainSettings

Metrics = dict[str, float]


@dataclass
class State:
    """All that is not a tensor; it is part of every checkpoint."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # of the next batch in the epoch
    tokens: int = 0  # targets learned from
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: float | None = None
    worse: int = 0  # evaluations since the best
    done: bool = False  # stopped early
    metrics_bytes: int = 0  # of metrics.jsonl that belong to the steps so far
    notes: list[str] = field(default_factory=list)


class Journal:
    """The progress line, metrics.jsonl, and TensorBoard's file where that is asked for."""

    def __init__(self, folder: Path, model: Model, settings: TrainSettings, world: World, quiet: bool) -> None:
        self.folder, self.model, self.settings, self.world = folder, model, settings, world
        self.progress = Progress(settings.steps, quiet=quiet or not world.main, every=settings.log_every)
        self.rate = 0.0  # FLOP/s of this machine's matrix products
        self.board: Any = None
        # Loss and targets since the last log, and the last gradient's norm. A run that is stopped between two logs
        # goes on with these, so that the next line says what it would have said.
        self.sums = torch.zeros(3, device=world.device)
        self._clear(0)

    def _clear(self, step: int) -> None:
        self.targets = 0
        self.tokens: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.since = (time.perf_counter(), step)

    def start(self, state: State) -> None:
        self.rate = matrix_rate(self.world.device, getattr(torch, self.settings.dtype)) * self.world.size
        self._clear(state.step)
        if not self.world.main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        path.touch()
        with path.open("r+b") as file:  # lines of steps that are done again go
            file.truncate(min(state.metrics_bytes, path.stat().st_size))
        if self.settings.tensorboard:
            self.board = _board(self.folder / "tensorboard", state.step)

    def count(self, batch: Batch) -> None:
        """The work of a batch."""
        if not batch.weight:
            return
        self.targets += batch.targets
        for name, tokens in batch.tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + tokens
            self.sequences[name] = self.sequences.get(name, 0) + batch.sequences

    def learned(self, loss: Tensor, targets: float, norm: Tensor, bad: Tensor) -> None:
        """The loss of a step, unless it was skipped; nothing is read back from a GPU here."""
        step = torch.stack([loss, torch.full_like(loss, targets), norm.to(loss.dtype)])
        kept = torch.where(bad, torch.zeros_like(step), step)
        self.sums[:2] += kept[:2]
        self.sums[2] = torch.where(bad, self.sums[2], kept[2])

    def log(self, state: State, rate: float) -> None:
        """A line for the steps since the last one."""
        loss, targets, learned = self.world.sum(*self.sums[:2].tolist(), self.targets)
        now, steps = time.perf_counter(), state.step - self.since[1]
        elapsed = max(now - self.since[0], 1e-9)
        state.seconds = round(state.seconds + elapsed, 3)
        metrics: Metrics = {
            "step": state.step, "time": state.seconds, "loss": loss / max(targets, 1.0), "learning_rate": rate,
            "gradient_norm": float(self.sums[2]), "tokens": state.tokens, "tokens_per_second": learned / elapsed,
        }  # fmt: skip
        share = self._utilisation(elapsed)
        if share is not None:
            metrics["utilisation"] = share
        self.write(state, metrics)
        left = elapsed / max(steps, 1) * (self.settings.steps - state.step)
        self.progress.update(
            state.step, loss=metrics["loss"], tokens_per_second=metrics["tokens_per_second"], utilisation=share,
            learning_rate=rate, seconds_left=left,
        )  # fmt: skip
        self.sums.zero_()
        self._clear(state.step)

    def _utilisation(self, elapsed: float) -> float | None:
        """The share of the matrix rate; a rate measured while others used the machine is measured again."""
        work = self._flops() / elapsed
        if work > self.rate and self.world.size == 1:
            self.rate = max(self.rate, matrix_rate(self.world.device, getattr(torch, self.settings.dtype)))
        return work / self.rate if work <= self.rate else None

    def _flops(self) -> float:
        tokens = dict(self.tokens)
        lengths = {name: tokens[name] / max(self.sequences[name], 1) for name in tokens}
        config = self.model.config
        if config.image_input:
            lengths = {"source": config.num_patches + 1.0}
            tokens = {"source": tokens.get("pixels", 0) * (config.num_patches + 1)}
        elif "ids" in tokens:
            side = "target" if config.shape == "decoder" else "source"
            tokens, lengths = {side: tokens["ids"]}, {side: lengths["ids"]}
        return flops(self.model, config, tokens, lengths) * self.world.size if tokens else 0.0

    def write(self, state: State, metrics: Metrics) -> None:
        """A line in metrics.jsonl, whole as soon as it is there."""
        if not self.world.main:
            return
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
            state.metrics_bytes = file.tell()
        if self.board is not None:
            for name, value in metrics.items():
                if name != "step":
                    self.board.add_scalar(name, value, state.step)
            self.board.flush()

    def say(self, state: State, text: str) -> None:
        """A line on the screen that the report keeps."""
        state.notes.append(text)
        self.progress.message(text)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not training's."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.since = (self.since[0] + time.perf_counter() - begun, self.since[1])


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("train.tensorboard needs tensorboard: pip install 'sublayer[tensorboard]'") from None
    return SummaryWriter(folder, purge_step=step + 1)


@contextmanager
def listening(heard: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `heard` for SIGINT and SIGTERM instead of what they would do."""

    def handler(number: int, frame: FrameType | None) -> None:
        heard(signal.Signals(number))

    try:
        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are someone else's
        before = {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
