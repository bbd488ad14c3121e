"""The examples of a store, numbered: what a batch is made of, and how long each is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .objectives import Example
from .store import Store
from .tasks import TASKS, Context

Numbers = NDArray[np.int64]
# Fields of several examples laid end to end, with the size of each; a field that is no sequence has one row each.
Flat = dict[str, tuple[NDArray[Any], Numbers]]


def lay(examples: Sequence[Example]) -> Flat:
    """Examples that have the same fields, end to end."""
    out: Flat = {}
    first = examples[0]
    along = next((first[name] for name in ("target", "ids") if name in first), None)
    for name, value in first.items():
        rows = [example[name] for example in examples]
        if along is None or (name == "labels" and value.shape != along.shape):
            out[name] = np.stack(rows), np.ones(len(rows), np.int64)
        else:
            out[name] = np.concatenate(rows).astype(np.int64, copy=False), np.array([row.size for row in rows])
    return out


class Items:
    """One example for each row of a store, or for each window of a document."""

    def __init__(self, store: Store, context: Context) -> None:
        self.store, self.context = store, context
        self.task = TASKS[context.settings.objective]
        limit = context.settings.max_length
        if self.task.windows:
            room = limit - sum(map(len, context.words.frame))
            self.rows, self.starts, self.sizes = _windows(store.lengths(self.task.measure), room)
            self.lengths = self.sizes + (limit - room)
        elif self.task.measure == "pixels":
            self.lengths = np.ones(len(store), np.int64)
        else:
            longest = [store.lengths(name) for name, kind in self.task.fields.items() if kind == "token"]
            self.lengths = np.minimum(np.maximum.reduce(longest) + 1, limit)

    def __len__(self) -> int:
        return len(self.lengths)

    def order(self, seed: int | None, epoch: int) -> Numbers:
        """All items, shuffled by the seed and the epoch; without a seed as they stand."""
        if seed is None:
            return np.arange(len(self))
        return np.random.default_rng((seed, epoch)).permutation(len(self))

    def keys(self, order: Numbers) -> Numbers:
        """What batches are grouped by."""
        return self.lengths[order]

    def flat(self, items: Numbers, seed: int | None, epoch: int) -> Flat:
        """The examples of a batch, laid end to end."""
        if self.context.settings.objective == "sequence-to-sequence":
            return self._pairs(items)
        return lay([example for item in items for example in self.examples(int(item), seed, epoch)])

    def _pairs(self, items: Numbers) -> Flat:
        """`objectives.sequence_to_sequence` for all items at once: pairs are short, and a step has thousands."""
        words, limit = self.context.words, self.context.settings.max_length
        start, eos = words.need(words.start_role, "sequence-to-sequence"), words.need("eos", "sequence-to-sequence")
        source, sizes, cut = self._gather("source", items, limit, 0)
        source[sizes.cumsum()[cut] - 1] = self.store.columns["source"][self.store.ends["source"][items[cut]] - 1]
        labels, lengths, cut = self._gather("target", items, limit, 1)
        labels[np.delete(lengths.cumsum(), cut) - 1] = eos
        target = np.roll(labels, 1)
        target[lengths.cumsum() - lengths] = start
        return {"source": (source, sizes), "target": (target, lengths), "labels": (labels, lengths)}

    def _gather(self, name: str, items: Numbers, limit: int, more: int) -> tuple[Numbers, Numbers, Numbers]:
        """A field of several rows end to end, each with room for `more` and cut to `limit`; and which were cut."""
        ends, column = self.store.ends[name], self.store.columns[name]
        starts = np.where(items > 0, ends[items - 1], 0)
        whole = ends[items] - starts + more
        sizes = np.minimum(whole, limit)
        places = np.repeat(starts - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())
        values = column[np.minimum(places, len(column) - 1)].astype(np.int64)
        return values, sizes, np.flatnonzero(whole > limit)

    def examples(self, item: int, seed: int | None, epoch: int) -> list[Example]:
        # Evaluation has no seed, and the noise of a denoising objective must still be the same each time.
        random = functools.partial(np.random.default_rng, (seed or 0, epoch, item))
        if not self.task.windows:
            return [self.task.example(self.store.row(item), self.context, random)]
        begin = int(self.starts[item])
        text = self.store.row(int(self.rows[item]))["text"][begin : begin + int(self.sizes[item])]
        return [self.task.example({"text": text}, self.context, random)]


class CausalRows:
    """Documents laid end to end and cut into rows of one length, each row a list of pieces of documents.

    A token is predicted from those before it in its own document: a document of n tokens has n - 1 predictions, and
    every one of them stands in exactly one row. What does not fill the last row waits for the next epoch's order.
    """

    def __init__(self, store: Store, context: Context) -> None:
        self.store, self.context = store, context
        self.task = TASKS["causal"]
        self.length = context.settings.max_length
        self.predictions = np.maximum(store.lengths("text") - 1, 0)
        total = int(self.predictions.sum())
        self.full, rest = divmod(total, self.length)
        self.lengths = np.full(self.full + bool(rest), self.length)
        if rest:
            self.lengths[-1] = rest
        self._epoch: tuple[int | None, int] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def order(self, seed: int | None, epoch: int) -> Numbers:
        self._lay(seed, epoch)
        if seed is None:
            return np.arange(len(self))
        rows = max(self.full, 1) if len(self) else 0
        return np.random.default_rng((seed, epoch, 1)).permutation(rows)

    def keys(self, order: Numbers) -> Numbers:
        return np.zeros(len(order), np.int64)

    def _lay(self, seed: int | None, epoch: int) -> None:
        """The documents in the order of this epoch, and where each ends in the stream."""
        if self._epoch == (seed, epoch):
            return
        self._epoch = (seed, epoch)
        rows = len(self.predictions)
        self.documents = np.arange(rows) if seed is None else np.random.default_rng((seed, epoch)).permutation(rows)
        self.ends = self.predictions[self.documents].cumsum()

    def flat(self, items: Numbers, seed: int | None, epoch: int) -> Flat:
        return lay([example for item in items for example in self.examples(int(item), seed, epoch)])

    def examples(self, item: int, seed: int | None, epoch: int) -> list[Example]:
        self._lay(seed, epoch)
        begin, end = item * self.length, min((item + 1) * self.length, int(self.ends[-1]))
        place = int(np.searchsorted(self.ends, begin, side="right"))
        pieces: list[Example] = []
        while begin < end:
            document = int(self.documents[place])
            start = int(self.ends[place] - self.predictions[document])  # of the document, in the stream
            stop = min(end, int(self.ends[place]))
            if stop > begin:
                text = self.store.row(document)["text"][begin - start : stop - start + 1]
                pieces.append(self.task.example({"text": text}, self.context, np.random.default_rng))
            begin, place = stop, place + 1
        return pieces


def make_items(store: Store, context: Context) -> Items | CausalRows:
    return (CausalRows if context.settings.objective == "causal" else Items)(store, context)


def _windows(lengths: Numbers, room: int) -> tuple[Numbers, Numbers, Numbers]:
    """Every document cut into windows of `room` tokens: the row, the start and the size of each.

    A last window of fewer than a few tokens is nothing to learn from, and is left out.
    """
    if room < 2:
        raise ValueError("data.max_length leaves no room for text beside the special tokens; raise it")
    counts = -(-lengths // room)
    rows = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)) * room
    sizes = np.minimum(lengths[rows] - starts, room)
    kept = sizes >= 4
    return rows[kept], starts[kept], sizes[kept]


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch: the items of batch b are order[ends[b - 1] : ends[b]]."""

    order: Numbers
    ends: Numbers

    def __len__(self) -> int:
        return len(self.ends)

    def batch(self, index: int) -> Numbers:
        return self.order[(self.ends[index - 1] if index else 0) : self.ends[index]]


def plan_epoch(
    items: Items | CausalRows, *, tokens: int, group: bool, seed: int | None, epoch: int, limit: int | None = None
) -> Plan:
    """Cut the items into batches of at most `tokens` tokens. The result depends on the seed and the epoch alone.

    Grouped by length, items of about the same length stand together: the order is sorted within stretches of a hundred
    batches, upwards and downwards in turn, so that a batch across two stretches is of one length too; this keeps most
    of the shuffling, and the batches are shuffled afterwards.
    """
    order = items.order(seed, epoch)
    if limit is not None:
        order = order[: 1 + int(np.searchsorted(items.lengths[order].cumsum(), limit))]
    if not len(order):
        raise ValueError("there is nothing to train on: no example is long enough; check the data and data.max_length")
    if group:
        stretch = max(1, int(100 * tokens / max(items.lengths.mean(), 1)))
        part = np.arange(len(order)) // stretch if seed is not None else np.zeros(len(order), np.int64)
        keys = items.keys(order) * np.where(part % 2, -1, 1)
        order = order[np.lexsort((keys, part))]
    ends = _cut(items.lengths[order], tokens)
    if seed is None or not group:
        return Plan(order, ends)
    batches = np.split(order, ends[:-1])
    shuffled = [batches[n] for n in np.random.default_rng((seed, epoch, 2)).permutation(len(batches))]
    return Plan(np.concatenate(shuffled), np.array([len(batch) for batch in shuffled]).cumsum())


def _cut(lengths: Numbers, tokens: int) -> Numbers:
    """Where batches end, each as full as `tokens` allows; an item that is longer is a batch of its own."""
    total = lengths.cumsum()
    ends: list[int] = []
    done = 0
    while not ends or ends[-1] < len(lengths):
        end = int(np.searchsorted(total, done + tokens, side="right"))
        ends.append(max(end, (ends[-1] if ends else 0) + 1))
        done = int(total[ends[-1] - 1])
    return np.array(ends, dtype=np.int64)


def split(lengths: Numbers, *, tokens: int | None, shares: int) -> list[slice]:
    """Cut a batch into consecutive parts of at most `tokens` tokens, as many for each of `shares` processes."""
    total = lengths.cumsum()
    parts = 1 if tokens is None else len(_cut(lengths, tokens))
    parts = min(-(-parts // shares) * shares, len(lengths))
    bounds = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts, side="left")
    edges = np.unique(np.concatenate([[0], bounds, [len(lengths)]]))
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(edges)]
