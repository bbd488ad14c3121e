"""Speculative decoding (Leviathan et al. 2023): guess some tokens cheaply, then let the model judge them all at once.

The model chooses each token as it would without guesses, with the same random number; a guess that is the same token
has saved a step, and the first that is not ends the round. So not only the distribution of the answers is that of plain
decoding: with a seed they are the same answers, to the rounding of one pass over several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..models import Model
from .choose import RowChooser
from .options import Options, ends_of
from .session import Session

RUNS = (3, 2)  # how many tokens at the end of a text are looked up in what came before


class Guesser(Protocol):
    def __call__(self, answers: list[list[int]], wanted: list[int]) -> list[list[int]]:
        """For each answer so far, at most so many tokens that may come next."""
        ...


class Lookup:
    """What followed the last time the text had the same few tokens (Saxena 2023): it guesses copies well."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.read = [0] * len(prompts)
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in prompts]  # where that stands which followed a run

    def __call__(self, answers: list[list[int]], wanted: list[int]) -> list[list[int]]:
        return [
            self._guess(row, answer, count) for row, (answer, count) in enumerate(zip(answers, wanted, strict=True))
        ]

    def _guess(self, row: int, answer: list[int], count: int) -> list[int]:
        text, after = self.prompts[row] + answer, self.after[row]
        for end in range(self.read[row], len(text)):
            after.update({tuple(text[end - size : end]): end for size in RUNS if end >= size})
        self.read[row] = len(text)
        places = (after.get(tuple(text[-size:])) for size in RUNS)
        place = next((place for place in places if place is not None), len(text))
        return text[place : place + count]


class Draft:
    """A smaller model that says what it would say, with the random numbers that will judge it."""

    def __init__(self, session: Session, choosers: list[RowChooser], judges: list[RowChooser]) -> None:
        self.session, self.choosers, self.judges = session, choosers, judges
        self.start = session.cache.lengths.clone()
        self.read: list[list[int]] = [[] for _ in choosers]  # tokens of each answer in the cache

    def __call__(self, answers: list[list[int]], wanted: list[int]) -> list[list[int]]:
        for chooser, judge in zip(self.choosers, self.judges, strict=True):
            chooser.follow(judge)
        self._go_back(answers)
        guesses: list[list[int]] = [[] for _ in answers]
        for _ in range(max(wanted)):
            rows = [row for row, count in enumerate(wanted) if len(guesses[row]) < count]
            new = {row: (answers[row] + guesses[row])[len(self.read[row]) :] for row in rows}
            logits = feed(self.session, [new.get(row, []) for row in range(len(answers))])
            for row in rows:
                self.read[row] += new[row]
                guesses[row].append(int(self.choosers[row](logits[row, len(new[row]) - 1], self.read[row])))
        return guesses

    def _go_back(self, answers: list[list[int]]) -> None:
        """Forget guesses that were wrong."""
        for row, answer in enumerate(answers):
            pairs = zip(self.read[row], answer[:-1], strict=False)
            same = next(
                (n for n, (mine, its) in enumerate(pairs) if mine != its), min(len(self.read[row]), len(answer) - 1)
            )
            self.read[row] = answer[:same]
        self.session.cache.rewind(self.start + self.start.new_tensor([len(read) for read in self.read]))


def speculate(model: Model, ids: Tensor, mask: Tensor | None, options: Options) -> Iterator[list[list[int]]]:
    """The new tokens of each row, some at a time; a row that has ended gets no more."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    prompts = [row[kept].tolist() for row, kept in zip(ids, real, strict=True)]
    with Session(model, ids, mask, options.max_new_tokens, options.start_id) as session:
        said = [row[kept].tolist() for row, kept in zip(session.said, session.real, strict=True)]
        choosers = [RowChooser(model, text, options) for text in said]
        if options.draft is None:
            yield from _rounds(session, choosers, Lookup(prompts), options)
            return
        check_draft(model, options.draft)
        with Session(options.draft, ids, mask, options.max_new_tokens, options.start_id) as other:
            drafts = [RowChooser(options.draft, text, options) for text in said]
            yield from _rounds(session, choosers, Draft(other, drafts, choosers), options)


def _rounds(
    session: Session, choosers: list[RowChooser], guess: Guesser, options: Options
) -> Iterator[list[list[int]]]:
    ends = ends_of(session.model.config, options)
    start = session.cache.lengths.clone()
    answers = [[int(choose(logits, []))] for choose, logits in zip(choosers, session.logits, strict=True)]
    yield [[*answer] for answer in answers]
    while True:
        room = [0 if answer[-1] in ends else options.max_new_tokens - len(answer) for answer in answers]
        if not any(room):
            return
        # A row that goes on says at least one token itself.
        guesses = guess(answers, [min(options.guesses, max(left - 1, 0)) for left in room])
        logits = feed(
            session,
            [[answer[-1], *more] if left else [] for answer, more, left in zip(answers, guesses, room, strict=True)],
        )
        before = [len(answer) for answer in answers]
        for row, left in enumerate(room):
            if left:
                _judge(answers[row], guesses[row], logits[row], choosers[row], ends)
        session.cache.rewind(start + start.new_tensor([len(answer) - 1 for answer in answers]))
        yield [answer[count:] for answer, count in zip(answers, before, strict=True)]


def _judge(answer: list[int], guesses: list[int], logits: Tensor, choose: RowChooser, ends: list[int]) -> None:
    """Add to an answer what the model says, as long as it has read the right tokens."""
    for place in range(len(guesses) + 1):
        answer.append(int(choose(logits[place], answer)))
        if answer[-1] in ends or place == len(guesses) or answer[-1] != guesses[place]:
            return


def feed(session: Session, rows: list[list[int]]) -> Tensor:
    """Logits (B, T, V) after each of some more tokens, of which rows have different numbers, or none."""
    longest = max(map(len, rows))
    device = session.cache.lengths.device
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return session.feed(ids)
    count = torch.tensor([len(row) for row in rows], device=device)
    return session.feed(ids, torch.arange(longest, device=device) < count[:, None])


def check_draft(model: Model, draft: Model) -> None:
    for name in ("shape", "vocab_size", "output_vocab_size"):
        mine, its = getattr(model.config, name), getattr(draft.config, name)
        if mine != its:
            raise ValueError(f"the draft's {name} is {its!r} and the model's {mine!r}; both must read the same tokens")
