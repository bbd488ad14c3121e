"""The rows of an encoder-decoder: each holds the keys and values of its source beside those of its answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.cache import Cache, CrossEntry
from ..core.layout import Layout
from ..generation.session import start_of
from ..lm import LM
from .job import Event
from .slots import GRAIN, Row, SlotRow, Slots, answering


class SourceSlots(Slots):
    def __init__(self, lm: LM, rows: int, capacity: int, chunk: int = 256) -> None:
        super().__init__(lm, rows, capacity, chunk)
        config, device, dtype = lm.config, lm.model.device, lm.model.cache_dtype
        start_of(config, None)  # that there is none is said before anyone asks
        shape = (rows, capacity, config.kv_heads, config.head_size)
        layers = range(config.num_decoder_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # of the sources

    @property
    def cached(self) -> int:
        return super().cached + sum(len(row.prompt) for row in self.rows if row is not None and row.read)

    def drop(self, row: SlotRow) -> None:
        super().drop(row)
        for tensor in (*self.keys, *self.values):  # as Cache.clear does, and for its reason
            tensor[row.slot, : len(row.prompt)] = 0
        self.lengths[row.slot] = 0

    def prefill(self) -> list[tuple[SlotRow, Event]]:
        """Read some sources together, the oldest first, each as a whole; and give each answer its first token."""
        rows: list[SlotRow] = []
        for row in [row for row in self._order if not row.ready]:
            longest = max(len(one.prompt) for one in (*rows, row))
            if rows and longest * (len(rows) + 1) > self.chunk:
                break
            rows.append(row)
        if not rows:
            return []
        slots, lengths = [row.slot for row in rows], [len(row.prompt) for row in rows]
        device, longest = self.model.device, max(lengths)
        ids = torch.tensor([row.prompt + [0] * (longest - len(row.prompt)) for row in rows], device=device)
        mask = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
        first = torch.tensor([row.said for row in rows], device=device)
        fresh = self.model.make_cache(len(rows), 1)
        with answering(self.model, rows):
            features = self.model.features(ids, first, source_mask=mask, cache=fresh)
        for mine, its in zip((*self.cache.keys, *self.cache.values), (*fresh.keys, *fresh.values), strict=True):
            mine[slots, :1] = its[:, :1]
        for keys, values, entry in zip(self.keys, self.values, fresh.cross, strict=True):
            for mine, its in zip((keys, values), entry.read(), strict=True):
                mine[slots, :longest] = its.masked_fill(~mask[..., None, None], 0)
        self.cache.lengths[slots], self.lengths[slots] = fresh.lengths, mask.sum(1)
        for row in rows:
            row.read = 1
        return self._choose(rows, features[:, -1])

    def _features(self, rows: Sequence[Row | None], ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        with answering(self.model, rows):
            features: Tensor = self.model.features(None, ids, target_mask=mask, cache=cache)
        return features

    def _view(self, start: int, stop: int, tokens: int) -> Cache:
        view = super()._view(start, stop, tokens)
        lengths = self.lengths[start:stop]
        longest = max(len(row.prompt) for row in self.rows[start:stop] if row is not None)
        longest = min(-(-longest // GRAIN) * GRAIN, self.capacity)
        places = torch.arange(longest, device=lengths.device)
        view.memory = Layout(places, places < lengths[:, None])
        view.cross = [
            CrossEntry(keys[start:stop, :longest], values[start:stop, :longest])
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        return view
