"""Examples to tensors: padded (B, T) with a mask, or packed (N,) with the length of each sequence."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .items import CausalRows, Items, Plan, plan_epoch, split
from .objectives import IGNORE, Example


@dataclass
class Batch:
    """Inputs by name ("ids", or "source" and "target", or "pixels"; "token_types"), and what should come out.

    Padded, `masks` holds True for real tokens, or None where all are. Packed, `lengths` holds how long each sequence
    is. `places` says where labels count, as places in the flattened labels; None: everywhere.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    masks: dict[str, Tensor | None] = field(default_factory=dict)
    lengths: dict[str, Tensor] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    places: Tensor | None = None
    targets: int = 0  # labels that count
    tokens: dict[str, int] = field(default_factory=dict)  # real tokens of each input
    weight: float = 1.0  # 0 for a batch that only keeps a process in step with the others

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self

        def move(tensor: Any) -> Any:
            return tensor.pin_memory().to(device, non_blocking=True) if isinstance(tensor, Tensor) else tensor

        def move_all(tensors: dict[str, Any]) -> dict[str, Any]:
            return {name: move(tensor) for name, tensor in tensors.items()}

        return Batch(
            move_all(self.inputs), move(self.labels), move_all(self.masks), move_all(self.lengths), self.longest,
            move(self.places), self.targets, self.tokens, self.weight,
        )  # fmt: skip


def collate(examples: Sequence[Example], *, packed: bool, pad: int = 0, bound: int | None = None) -> Batch:
    """One batch of examples that have the same fields. `bound` is the longest a sequence may ever be."""
    first = examples[0]
    if "pixels" in first:
        pixels = torch.from_numpy(np.stack([one["pixels"] for one in examples]))
        labels = torch.from_numpy(np.stack([one["labels"] for one in examples]))
        patches = {"pixels": len(examples)}
        return Batch({"pixels": pixels.float() / 127.5 - 1.0}, labels, targets=len(examples), tokens=patches)
    batch = Batch({}, torch.empty(0))
    along = "target" if "target" in first else "ids"  # the input that labels for tokens are aligned with
    for name in first:
        if name == "labels" and first["labels"].shape != first[along].shape:
            batch.labels = torch.from_numpy(np.stack([one["labels"] for one in examples]))
            batch.targets = len(examples)
            continue
        rows = [one[name] for one in examples]
        sizes = np.array([row.size for row in rows])
        flat = np.concatenate(rows).astype(np.int64, copy=False)
        if not packed:
            flat = _grid(flat, sizes, IGNORE if name == "labels" else 0 if name == "token_types" else pad)
        if name == "labels":
            batch.labels = torch.from_numpy(flat)
            counted = flat.reshape(-1) != IGNORE
            batch.targets = int(counted.sum())
            batch.places = None if batch.targets == counted.size else torch.from_numpy(np.flatnonzero(counted))
            continue
        batch.inputs[name] = torch.from_numpy(flat)
        if name == "token_types":
            continue
        batch.tokens[name] = int(sizes.sum())
        if packed:
            batch.lengths[name] = torch.from_numpy(sizes)
            batch.longest[name] = bound or int(sizes.max())
        else:
            even = bool((sizes == sizes.max()).all())
            batch.masks[name] = None if even else torch.from_numpy(np.arange(sizes.max()) < sizes[:, None])
    return batch


def _grid(flat: NDArray[np.int64], sizes: NDArray[Any], fill: int) -> NDArray[np.int64]:
    """Rows laid end to end to (rows, longest)."""
    longest = int(sizes.max())
    if len(flat) == longest * len(sizes):
        return flat.reshape(len(sizes), longest)
    out = np.full((len(sizes), longest), fill, dtype=np.int64)
    out[np.arange(longest) < sizes[:, None]] = flat
    return out


@dataclass(frozen=True)
class Step:
    """The batches of one optimiser step that are this process's share."""

    epoch: int
    index: int  # of the batch within the epoch
    batches: list[Batch]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Steps without end, from any place on. What comes does not depend on where it was begun."""

    items: Items | CausalRows
    batch_tokens: int
    micro_tokens: int | None = None
    seed: int = 0
    group: bool = True
    packed: bool = False
    pad: int = 0
    bound: int | None = None
    limit: int | None = None  # tokens that `once` reads
    rank: int = 0
    world: int = 1

    def plan(self, epoch: int) -> Plan:
        return plan_epoch(self.items, tokens=self.batch_tokens, group=self.group, seed=self.seed, epoch=epoch)

    def steps(self, epoch: int = 0, index: int = 0) -> Iterator[Step]:
        while True:
            plan = self.plan(epoch)
            for place in range(index, len(plan)):
                yield Step(epoch, place, self.share(plan.batch(place), epoch, self.seed))
            epoch, index = epoch + 1, 0

    def share(self, batch: NDArray[np.int64], epoch: int, seed: int | None) -> list[Batch]:
        parts = split(self.items.lengths[batch], tokens=self.micro_tokens, shares=self.world)
        rounds = -(-len(parts) // self.world)
        mine = []
        for turn in range(rounds):
            number = turn * self.world + self.rank
            made = self.make(batch[parts[min(number, len(parts) - 1)]], epoch, seed)
            if number >= len(parts):
                made.weight, made.targets = 0.0, 0
            mine.append(made)
        return mine

    def make(self, items: NDArray[np.int64], epoch: int, seed: int | None) -> Batch:
        rows = [self.items.examples(int(item), seed, epoch) for item in items]
        examples = [example for row in rows for example in row]
        # Pieces of documents share a row without seeing each other only where they are packed.
        packed = self.packed or len(examples) > len(rows)
        return collate(examples, packed=packed, pad=self.pad, bound=self.bound)

    def once(self) -> Iterator[list[Batch]]:
        """Every item once, in the order of length, for evaluation."""
        plan = plan_epoch(self.items, tokens=self.batch_tokens, group=self.group, seed=None, epoch=0, limit=self.limit)
        for place in range(len(plan)):
            yield self.share(plan.batch(place), 0, None)


def ahead(steps: Iterator[Step], count: int = 4) -> Iterator[Step]:
    """The same steps, made by a thread while the model works on earlier ones."""
    ready: queue.Queue[Step | BaseException] = queue.Queue(count)
    stopped = threading.Event()

    def put(item: Step | BaseException) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for step in steps:
                put(step)
                if stopped.is_set():
                    return
        except BaseException as error:  # is raised where the step was asked for
            put(error)

    threading.Thread(target=work, daemon=True, name="batches").start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
