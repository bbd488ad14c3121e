"""Keys and values of the tokens so far, in memory set aside once.

The cache holds real tokens only, each in the slot of its position, so rows of one batch may be of different lengths
whatever side their padding was on. Padding is written to one spare slot that nobody reads. All that changes from step
to step is in tensors: a compiled step is compiled once.

A layer that looks only a window far back needs no more slots than the window and the tokens of one step: where that is
known, position p goes to slot p mod size, over a token that nobody looks at any more.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig
from .layout import Layout, may_look

Index = tuple[Tensor | slice, Tensor | slice]  # rows and slots


@dataclass
class Entry:
    """What one self-attention layer reads and writes in one step."""

    keys: Tensor  # (B, size + 1, K, E)
    values: Tensor
    slots: Index  # where the new tokens go
    reach: int | None  # slots that are read; None: all but the spare one

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, T, K, E); give back those so far (B, S, K, E)."""
        self.keys[self.slots] = key.to(self.keys.dtype)
        self.values[self.slots] = value.to(self.values.dtype)
        reach = -1 if self.reach is None else self.reach
        return self.keys[:, :reach], self.values[:, :reach]


@dataclass
class CrossEntry:
    """A cross-attention layer's keys and values: those of the source, computed once."""

    key: Tensor | None = None
    value: Tensor | None = None
    dtype: torch.dtype | None = None

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key, self.value = key.to(self.dtype), value.to(self.dtype)
        return self.key, self.value

    def read(self) -> tuple[Tensor, Tensor]:
        assert self.key is not None and self.value is not None
        return self.key, self.value


class Cache:
    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        chunk: int | None = None,  # a step has no more tokens than this
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache of batch {batch} and capacity {capacity} is empty; both must be at least 1")
        limited = config.positions == "learned" or config.positions.startswith("sinusoidal")
        if limited and capacity > config.max_positions:
            raise ValueError(
                f"{capacity} tokens, prompt and answer together, are longer than the {config.max_positions} positions "
                "of the model; shorten the prompt or ask for fewer new tokens"
            )
        self.capacity, self.chunk = capacity, chunk
        self.windows = config.windows("decoder")
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        shapes = [(batch, self.size(window) + 1, config.kv_heads, config.head_size) for window in self.windows]
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.cross = [CrossEntry(dtype=dtype) for _ in shapes]
        self.memory: Layout | None = None
        self.parted: Tensor | None = None  # (B, B), on the CPU: the first slot in which two rows may differ

    def size(self, window: int | None) -> int:
        """Slots of a layer that looks this far."""
        if window is None or self.chunk is None:
            return self.capacity
        return min(self.capacity, window + self.chunk - 1)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reach(self, layout: Layout, size: int) -> int:
        """Slots that a step reads: those filled by then, or, where shapes must not change with the step, all."""
        if layout.positions.device.type != "cpu" or not may_look(layout.positions):
            return size
        return min(int(layout.positions.max()) + 1, size)

    def places(self, layout: Layout, window: int | None) -> Tensor:
        """Which position each slot holds after a step, in layers that look this far: (S,), or (B, S) where slots are
        used again."""
        size = self.size(window)
        slots = torch.arange(self.reach(layout, size), device=layout.positions.device)
        if size == self.capacity:
            return slots
        last = layout.positions.amax(-1, keepdim=True)
        return last - (last - slots) % size

    def entries(self, layout: Layout) -> list[Entry]:
        """One for each layer, for a step over tokens of this layout."""
        slots = layout.positions
        if self.chunk is not None and slots.size(-1) > self.chunk:
            raise ValueError(
                f"a step of {slots.size(-1)} tokens; this cache was made for steps of at most {self.chunk}"
            )
        real = slots if layout.valid is None else slots * layout.valid
        if may_look(real) and int(real.max()) >= self.capacity:
            raise ValueError(
                f"token {int(real.max()) + 1} of a sequence does not fit into a cache of {self.capacity}; "
                "make the cache as long as the prompt and the answer together"
            )
        sizes = {self.size(window) for window in self.windows}
        reaches = {size: self.reach(layout, size) for size in sizes}
        targets = {
            size: (self._index(layout, size), None if reaches[size] == size else reaches[size]) for size in sizes
        }
        return [
            Entry(keys, values, *targets[self.size(window)])
            for keys, values, window in zip(self.keys, self.values, self.windows, strict=True)
        ]

    def _index(self, layout: Layout, size: int) -> Index:
        """Where new tokens go in layers of this size."""
        slots, tokens = layout.positions, layout.positions.size(-1)
        if layout.valid is None and slots.device.type == "cpu" and may_look(slots):
            first = int(slots[0, 0]) % size
            if first + tokens <= size and (len(slots) == 1 or bool((slots[:, 0] == slots[0, 0]).all())):
                return slice(None), slice(first, first + tokens)  # the same place in every row: copied, not scattered
        slots = slots if size == self.capacity else slots % size
        slots = slots if layout.valid is None else torch.where(layout.valid, slots, size)
        return torch.arange(slots.size(0), device=slots.device)[:, None], slots

    def remember(self, memory: Layout | None) -> Layout:
        """The layout of the source: that of this call, or that of the call which brought it."""
        self.memory = memory or self.memory
        if self.memory is None:
            raise ValueError("the cache holds no source yet; the first call must give one")
        return self.memory

    def spread(self, times: int) -> Cache:
        """A cache in which each row stands `times` times. The source is not copied: `times` queries look at one."""
        out = copy.copy(self)
        out.lengths = self.lengths.repeat_interleave(times)
        out.keys = [keys.repeat_interleave(times, 0) for keys in self.keys]
        out.values = [values.repeat_interleave(times, 0) for values in self.values]
        family = torch.arange(len(out.lengths), device="cpu") // times
        out.parted = torch.where(family == family[:, None], out.lengths.cpu(), 0)
        return out

    def reorder(self, parents: Tensor) -> None:
        """Row r becomes a copy of row parents[r]. Only rows that change are copied, and of them only what differs."""
        order, rows = parents.cpu(), torch.arange(len(parents), device="cpu")
        changed = (order != rows).nonzero().squeeze(1)
        filled, start = int(self.lengths.max()), 0
        if self.parted is not None:
            start = int(self.parted[changed, order[changed]].min()) if len(changed) else filled
            self.parted = self.parted[order][:, order]
            twins = (order == order[:, None]) & (rows != rows[:, None])
            self.parted = torch.where(twins, self.lengths.cpu()[order], self.parted)
        self.lengths.copy_(self.lengths[parents])
        if not len(changed):
            return
        origin, changed = (index.to(parents.device) for index in (order[changed], changed))
        for tensor in (*self.keys, *self.values):
            # A slot that is used again and again stands for no place of its own.
            part = slice(start if tensor.size(1) > self.capacity else 0, filled)
            tensor[changed, part] = tensor[origin, part]

    def rows(self, start: int, stop: int, capacity: int | None = None) -> Cache:
        """Some rows as a cache of their own, in this one's memory: what a step writes there, it writes here.

        A smaller `capacity`, no less than what any of the rows holds, spares attention the slots behind it; the first
        of these takes the padding.
        """
        out = copy.copy(self)
        out.capacity = self.capacity if capacity is None else min(capacity, self.capacity)
        out.lengths = self.lengths[start:stop]
        sizes = [out.size(window) + 1 for window in self.windows]
        out.keys = [keys[start:stop, :size] for keys, size in zip(self.keys, sizes, strict=True)]
        out.values = [values[start:stop, :size] for values, size in zip(self.values, sizes, strict=True)]
        return out

    def rewind(self, lengths: Tensor) -> None:
        """Go back to shorter texts (B,): what came after is written over before anyone looks at it."""
        self.lengths.copy_(lengths)

    def serves(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether so many rows of so many tokens fit, for a model there and of that kind."""
        enough = self.lengths.size(0) >= batch and self.capacity >= capacity
        return enough and self.keys[0].device == device and self.keys[0].dtype == dtype

    def reset(self) -> None:
        """Forget all rows and the source."""
        filled = int(self.lengths.max())
        self.lengths.zero_()
        self.cross, self.memory = [CrossEntry(dtype=entry.dtype) for entry in self.cross], None
        self.parted = None
        for tensor in (*self.keys, *self.values):
            tensor[:, :filled] = 0

    def clear(self, row: int) -> None:
        """Forget a row. Its memory is zeroed: a mask hides old values, but not one that is infinite or no number."""
        filled = int(self.lengths[row])
        self.lengths[row] = 0
        for tensor in (*self.keys, *self.values):
            tensor[row, :filled] = 0

    def advance(self, layout: Layout) -> None:
        tokens = layout.positions.size(-1) if layout.valid is None else layout.valid.sum(1)
        self.lengths += tokens
