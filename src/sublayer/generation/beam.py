"""Beam search: the likeliest whole answers, by keeping the best few beginnings at every step.

A finished answer of n tokens scores Σ log p / n^α, as in fairseq, CTranslate2 and transformers (the prompt is not
counted), or Σ log p / ((5 + n) / 6)^α, as in GNMT. Twice as many candidates as beams are looked at in each step, so
that answers which end do not leave the search without beginnings to go on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .session import Session

NEVER = -1.0e9  # a score that no answer has; finite, so that 0 × it is 0

Scores = Callable[[Tensor, Tensor], Tensor]  # log-probabilities (rows, V) and the new tokens so far (rows, n)


@dataclass(frozen=True)
class Beams:
    """Answers, best first, padded after their ends."""

    tokens: Tensor  # (B, K, N)
    scores: Tensor  # (B, K)
    lengths: Tensor  # (B, K), the end included


def length_divisor(tokens: int, penalty: float, form: str) -> float:
    return float(tokens**penalty if form == "power" else ((5 + tokens) / 6) ** penalty)


def beam_search(
    session: Session,
    adjust: Scores,
    *,
    beams: int,
    max_new_tokens: int,
    ends: Tensor,
    pad: int,
    length_penalty: float = 1.0,
    length_form: str = "power",
    early_stopping: bool | str = False,
) -> Beams:
    """`session` has read the prompts, a row each. `early_stopping` decides when a search is over:

    True: as soon as there are as many answers as beams. False: when the best beginning, if it ended now, would not
    beat the worst of them. "never": when it would not even if it went on, as far as lengths can tell.
    """
    search = _Search(session.logits.size(0), beams, max_new_tokens, pad, session.logits.device)
    logits = session.logits.repeat_interleave(beams, 0)
    keep = beams * max(2, 1 + len(ends))
    for count in range(1, max_new_tokens + 1):
        scores = adjust(logits.float().log_softmax(-1), search.running.flatten(0, 1))
        classes = scores.size(-1)
        scores = (search.scores[:, :, None] + scores.view(-1, beams, classes)).flatten(1)  # (B, K·V)
        best, places = scores.topk(min(keep, scores.size(1)))
        parents, tokens = places // classes, places % classes
        candidates = torch.cat([_take(search.running, parents), tokens[:, :, None]], 2)
        ended = torch.isin(tokens, ends) | (count == max_new_tokens)
        divisor = length_divisor(count, length_penalty, length_form)
        search.finish(candidates, best / divisor, ended, early_stopping)
        chosen = search.go_on(candidates, best, ended)
        longest = max_new_tokens if early_stopping == "never" and length_penalty > 0 else count
        search.look_ahead(length_divisor(longest, length_penalty, length_form))
        if search.over(early_stopping) or bool(ended.all()):
            break
        if count == 1:
            session.spread(beams)
        rows = torch.arange(len(parents), device=parents.device)[:, None] * beams
        session.reorder((rows + parents.gather(1, chosen)).flatten())
        logits = session.step(search.running[:, :, -1].flatten())
    return Beams(search.answers[:, :, : int(search.lengths.max())], search.values, search.lengths)


class _Search:
    """Beginnings that go on and answers that have ended, of each row of a batch."""

    def __init__(self, batch: int, beams: int, length: int, pad: int, device: torch.device) -> None:
        self.beams = beams
        self.running = torch.empty(batch, beams, 0, dtype=torch.long, device=device)
        self.scores = torch.full((batch, beams), NEVER, device=device)
        self.scores[:, 0] = 0.0  # all beams begin alike: one stands for them
        self.pad = pad
        self.answers = torch.full((batch, beams, length), pad, dtype=torch.long, device=device)
        self.lengths = torch.zeros(batch, beams, dtype=torch.long, device=device)
        self.values = torch.full((batch, beams), NEVER, device=device)
        self.full = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self.open = torch.ones(batch, 1, dtype=torch.bool, device=device)  # an answer may still get better

    def finish(self, candidates: Tensor, values: Tensor, ended: Tensor, early: bool | str) -> None:
        """Put what has ended among the answers, if it is better than those there are."""
        new = ended & (torch.arange(ended.size(1), device=ended.device) < self.beams)
        closed = ~self.open | (self.full.all(1, keepdim=True) & (early is True))
        values = values + NEVER * closed + NEVER * ~new
        count = candidates.size(2)
        answers = torch.nn.functional.pad(candidates, (0, self.answers.size(2) - count), value=self.pad)
        merged = torch.cat([self.values, values], 1)
        self.values, best = merged.topk(self.beams)
        self.answers = _take(torch.cat([self.answers, answers], 1), best)
        self.full = torch.cat([self.full, new], 1).gather(1, best)
        self.lengths = torch.cat([self.lengths, torch.full_like(best.new_empty(new.shape), count)], 1).gather(1, best)

    def go_on(self, candidates: Tensor, scores: Tensor, ended: Tensor) -> Tensor:
        """Keep the best that have not ended; which candidates they are."""
        self.scores, chosen = (scores + NEVER * ended).topk(self.beams)
        self.running = _take(candidates, chosen)
        return chosen

    def look_ahead(self, divisor: float) -> None:
        """A row stays open while its best beginning could beat its worst answer."""
        worst = torch.where(self.full, self.values.amin(1, keepdim=True), NEVER)
        self.open = self.open & (self.scores[:, :1] / divisor > worst).any(1, keepdim=True)

    def over(self, early: bool | str) -> bool:
        return not bool(self.open.any()) or (early is True and bool(self.full.all()))


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of (B, K, N) by places (B, M): (B, M, N)."""
    return values.gather(1, places[:, :, None].expand(-1, -1, values.size(2)))
