"""The rows of one cache, each with an answer under way: prompts are read in chunks, answers grow a token a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import lora
from ..core.cache import Cache
from ..generation.answer import Answer, Chance
from ..generation.choose import RowChooser
from ..generation.constraint import Stuck
from ..generation.options import ends_of
from ..generation.session import start_of
from ..lm import LM
from ..models import Model
from .job import Event, Job

GRAIN = 64  # attention looks at a multiple of this many slots


class Row:
    """A job under way: the tokens so far, how the next one is chosen, and the text given out."""

    def __init__(self, lm: LM, job: Job) -> None:
        self.job, self.prompt = job, job.prompt
        self.ends = ends_of(lm.config, job.options)
        self.answer = Answer(lm.tokenizer, job.stop)
        self.tokens: list[int] = []
        self.slot = -1
        self.read = 0  # tokens in the cache

    @property
    def ready(self) -> bool:
        """Whether the prompt has been read."""
        return bool(self.tokens)

    def accept(self, token: int, chance: Chance | None = None) -> Event:
        """What one more token gives to the one who asked."""
        self.tokens.append(token)
        if token in self.ends:
            return self._event(*self.answer.finish(), reason="stop")
        text, chances = self.answer.add(token, chance)
        if self.answer.stopped:
            return self._event(text, chances, reason="stop")
        if len(self.tokens) < self.job.options.max_new_tokens:
            return self._event(text, chances)
        rest, others = self.answer.finish()
        return self._event(text + rest, chances + others, reason="stop" if self.answer.stopped else "length")

    def _event(self, text: str, chances: list[Chance], reason: str | None = None) -> Event:
        return Event(text=text, chances=tuple(chances), tokens=len(self.tokens), reason=reason)


class SlotRow(Row):
    def __init__(self, lm: LM, job: Job) -> None:
        super().__init__(lm, job)
        # The text that an encoder-decoder goes on with is that of its answer, which begins with one token.
        self.said = job.prompt if lm.config.shape == "decoder" else [start_of(lm.config, job.options.start_id)]
        self.choose = RowChooser(lm.model, self.said, job.options)


class Slots:
    def __init__(self, lm: LM, rows: int, capacity: int, chunk: int = 256) -> None:
        self.model: Any = lm.model
        self.capacity = capacity
        scaling = lm.config.rotary_scaling
        # Where the angles depend on how long the text is, a prompt in pieces would not be the prompt as a whole.
        self.chunk = capacity if scaling is not None and scaling.kind == "dynamic" else chunk
        self.cache = self.model.make_cache(rows, capacity, self.chunk)
        self.rows: list[SlotRow | None] = [None] * rows
        self._order: list[SlotRow] = []  # as they came

    @property
    def cached(self) -> int:
        return sum(row.read for row in self.rows if row is not None)

    def free(self) -> int:
        return self.rows.count(None)

    def put(self, row: SlotRow) -> None:
        row.slot = self.rows.index(None)
        self.rows[row.slot] = row
        self._order.append(row)

    def drop(self, row: SlotRow) -> None:
        self.rows[row.slot] = None
        self._order.remove(row)
        self.cache.clear(row.slot)

    def prefill(self) -> list[tuple[SlotRow, Event]]:
        """Read one chunk of what is still to be read, the oldest first; a prompt read to its end gives a token."""
        budget, events = self.chunk, []
        for row in [row for row in self._order if not row.ready]:
            count = min(budget, len(row.prompt) - row.read)
            if not count:
                break
            ids = torch.tensor([row.prompt[row.read : row.read + count]], device=self.model.device)
            features = self._features([row], ids, None, self._view(row.slot, row.slot + 1, row.read + count))
            row.read, budget = row.read + count, budget - count
            if row.read == len(row.prompt):
                events += self._choose([row], features[:, -1])
        return events

    def decode(self) -> list[tuple[SlotRow, Event]]:
        """One token for every row whose prompt has been read."""
        active = [row for row in self.rows if row is not None and row.ready]
        if not active:
            return []
        start, stop = active[0].slot, active[-1].slot + 1
        tokens, real = [0] * (stop - start), [False] * (stop - start)
        for row in active:
            tokens[row.slot - start], real[row.slot - start] = row.tokens[-1], True
        device = self.model.device
        ids, mask = torch.tensor(tokens, device=device)[:, None], torch.tensor(real, device=device)[:, None]
        # Padding goes to the slot behind the last one read, so that must hold nothing in any of the rows.
        longest = max(row.read + row.ready for row in self.rows[start:stop] if row is not None)
        cache = self._view(start, stop, longest)
        features = self._features(self.rows[start:stop], ids, None if all(real) else mask, cache)[:, -1]
        for row in active:
            row.read += 1
        return self._choose(active, features[mask[:, 0]])

    def _features(self, rows: Sequence[Row | None], ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        with answering(self.model, rows):
            features: Tensor = self.model.features(ids, mask=mask, cache=cache)
        return features

    def _view(self, start: int, stop: int, tokens: int) -> Cache:
        return self.cache.rows(start, stop, -(-tokens // GRAIN) * GRAIN)

    def _choose(self, rows: Sequence[SlotRow], features: Tensor) -> list[tuple[SlotRow, Event]]:
        """Tokens from features (rows, D). One look at the device's answer for all of them."""
        with answering(self.model, rows):
            logits = self.model.head(features).float()
        likeliest = logits.argmax(-1)
        stuck: set[int] = set()
        chosen = []
        for number, row in enumerate(rows):
            try:
                chosen.append(likeliest[number] if row.choose.greedy else row.choose(logits[number], row.tokens))
            except Stuck:  # this answer fails, not those beside it
                stuck.add(number)
                chosen.append(likeliest[number])
        tokens: list[int] = torch.stack(chosen).tolist()
        return [
            (row, Event(error="stuck", tokens=len(row.tokens)))
            if number in stuck
            else (row, row.accept(tokens[number], _chance(logits[number], tokens[number], row.job.top)))
            for number, row in enumerate(rows)
        ]


def answering(model: Model, rows: Sequence[Row | None]) -> AbstractContextManager[None]:
    """Within, each row of a batch is answered by the adapter its job asks for."""
    if not lora.names(model):
        return nullcontext()
    return lora.rows(model, [None if row is None else row.job.adapter for row in rows])


def _chance(logits: Tensor, token: int, top: int | None) -> Chance | None:
    """What the model itself says of a token, before temperature and penalties."""
    if top is None:
        return None
    logs = logits.log_softmax(-1)
    best = logs.topk(min(top, logs.numel()))
    return Chance(token, float(logs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
