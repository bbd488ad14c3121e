"""Examples to tensors: padded (B, T) with a mask, or packed (N,) with the length of each sequence."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .items import CausalRows, Flat, Items, Plan, plan_epoch, split
from .objectives import IGNORE


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
    rows: dict[str, int] = field(default_factory=dict)  # packed into rows: the tokens of a row, for each input
    places: Tensor | None = None
    targets: int = 0  # labels that count
    tokens: dict[str, int] = field(default_factory=dict)  # real tokens of each input
    sequences: int = 0
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
            self.rows, move(self.places), self.targets, self.tokens, self.sequences, self.weight,
        )  # fmt: skip


def collate(
    flat: Flat,
    *,
    packed: bool = False,
    pad: int = 0,
    bound: int | None = None,
    rows: dict[str, int] | None = None,
    count: int = 0,
) -> Batch:
    """One batch: padded to a grid, or packed; packed into rows of a given size, if `rows` says so, at least `count`.

    `bound` is the longest a sequence may ever be.
    """
    if "pixels" in flat:
        pixels, labels = (torch.from_numpy(flat[name][0]) for name in ("pixels", "labels"))
        patches = {"pixels": len(labels)}
        return Batch(
            {"pixels": pixels.float() / 127.5 - 1.0}, labels, targets=len(labels), tokens=patches, sequences=len(labels)
        )
    batch = Batch({}, torch.empty(0), rows=dict(rows or {}))
    along = "target" if "target" in flat else "ids"  # the input that labels for tokens are aligned with
    chosen = _rows({name: flat[name][1] for name in rows}, rows) if rows else np.empty(0, np.int64)
    fillers = -(-max(rows.values()) // (bound or max(rows.values()))) if rows else 0
    for name, (values, sizes) in flat.items():
        if name == "labels" and values.shape != flat[along][0].shape:
            batch.labels, batch.targets = torch.from_numpy(values), len(values)
            continue
        fill = IGNORE if name == "labels" else 0 if name == "token_types" else pad
        parts = sizes
        if rows:
            room = rows[name if name in rows else along]
            values, parts = _lay_rows(values, sizes, chosen, room, fill, fillers, count)
        elif not packed:
            values = _grid(values, sizes, fill)
        if name == "labels":
            batch.labels = torch.from_numpy(values)
            counted = values.reshape(-1) != IGNORE
            batch.targets = int(counted.sum())
            if not rows and batch.targets < counted.size:
                batch.places = torch.from_numpy(np.flatnonzero(counted))
            continue
        batch.inputs[name] = torch.from_numpy(values)
        if name == "token_types":
            continue
        batch.tokens[name], batch.sequences = int(sizes.sum()), len(sizes)
        if rows or packed:
            batch.lengths[name] = torch.from_numpy(parts)
            batch.longest[name] = bound or int(parts.max())
        else:
            even = bool((sizes == sizes.max()).all())
            batch.masks[name] = None if even else torch.from_numpy(np.arange(sizes.max()) < sizes[:, None])
    return batch


def _rows(sizes: dict[str, NDArray[Any]], room: dict[str, int]) -> NDArray[np.int64]:
    """The row of each sequence, in order, a new one begun when some input would not fit."""
    left = dict.fromkeys(room, 0)
    row, out = -1, np.empty(len(next(iter(sizes.values()))), np.int64)
    columns = {name: sizes[name].tolist() for name in room}
    for number in range(len(out)):
        if any(columns[name][number] > left[name] for name in room):
            assert all(columns[name][number] <= room[name] for name in room), "a sequence is longer than a row"
            row, left = row + 1, dict(room)
        for name in room:
            left[name] -= columns[name][number]
        out[number] = row
    return out


def _lay_rows(
    values: NDArray[np.int64],
    sizes: NDArray[Any],
    chosen: NDArray[np.int64],
    room: int,
    fill: int,
    fillers: int,
    count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences into rows of `room` tokens, end to end, and the length of each sequence.

    What is left of a row is filled by sequences that are nobody's, as many for each input, so that numbers agree.
    """
    count = max(count, int(chosen[-1]) + 1)
    before = sizes.cumsum() - sizes
    used = np.bincount(chosen, sizes, count).astype(np.int64)
    inside = before - (used.cumsum() - used)[chosen]
    out = np.full(count * room, fill, np.int64)
    out[np.repeat(chosen * room + inside - before, sizes) + np.arange(len(values))] = values
    lengths = np.zeros(len(sizes) + count * fillers, np.int64)
    lengths[np.arange(len(sizes)) + chosen * fillers] = sizes
    first = np.bincount(chosen, minlength=count).cumsum() + np.arange(count) * fillers
    for number in range(fillers):
        lengths[first + number] = (room - used + number) // fillers
    return out, lengths


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
    rows: dict[str, int] | None = None  # packed into rows of so many tokens
    row_count: int = 0  # rows of a batch, at least: batches of one shape
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
        flat = self.items.flat(items, seed, epoch)
        # Pieces of documents share a row without seeing each other only where they are packed; a row of one document
        # needs neither packing nor a mask.
        rows, even = self.rows, False
        if isinstance(self.items, CausalRows):
            even = len(flat["ids"][1]) == len(items)
            rows = rows if self.packed else {"ids": self.items.length}
        return collate(
            flat, packed=self.packed and not even, pad=self.pad, bound=self.bound, rows=None if even else rows,
            count=self.row_count,
        )  # fmt: skip

    def of_one_shape(self) -> Loader:
        """Packed into rows, with as many rows in every batch as the fullest of the first needs, and a little more."""
        if self.rows is None:
            return self
        plan, most = self.plan(0), 0
        for place in range(min(len(plan), 8)):
            for batch in self.share(plan.batch(place), 0, self.seed):
                most = max(most, *(batch.inputs[name].numel() // room for name, room in self.rows.items()))
        return dataclasses.replace(self, row_count=-(-most * 102 // 100 // 4) * 4)

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
