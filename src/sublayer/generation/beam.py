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
    groups: int = 1,
    diversity: float = 0.0,
) -> Beams:
    """`session` has read the prompts, a row each. `early_stopping` decides when a search is over:

    True: as soon as there are as many answers as beams. False: when the best beginning, if it ended now, would not
    beat the worst of them. "never": when it would not even if it went on, as far as lengths can tell.

    Several `groups` search apart, one after the other in each step; what those before it say in this step costs a group
    `diversity` each time (Vijayakumar et al. 2018).
    """
    batch, width = session.logits.size(0), beams // groups
    device = session.logits.device
    searches = [_Search(batch, width, max_new_tokens, pad, ends, early_stopping, device) for _ in range(groups)]
    logits = session.logits.repeat_interleave(beams, 0)
    for count in range(1, max_new_tokens + 1):
        running = torch.stack([search.running for search in searches], 1)  # (B, G, K, n)
        scores = adjust(logits.float().log_softmax(-1), running.flatten(0, 2)).view(batch, groups, width, -1)
        divisor = length_divisor(count, length_penalty, length_form)
        longest = max_new_tokens if early_stopping == "never" and length_penalty > 0 else count
        furthest = length_divisor(longest, length_penalty, length_form)
        said = torch.zeros(batch, scores.size(-1), device=device) if diversity else None
        parents = []
        for search, own in zip(searches, scores.unbind(1), strict=True):
            own = own if said is None else own - diversity * said[:, None]
            searching = search.open.float().expand(-1, width)
            parents.append(search.step(own, divisor, furthest, last=count == max_new_tokens))
            if said is not None:
                said.scatter_add_(1, search.running[:, :, -1], searching)
        if not any(bool(search.open.any()) for search in searches):
            break
        if count == 1:
            session.spread(beams)
        rows = torch.arange(batch * groups, device=device).view(batch, groups, 1) * width
        session.reorder((rows + torch.stack(parents, 1)).flatten())
        logits = session.step(torch.stack([search.running[:, :, -1] for search in searches], 1).flatten())
    return _best(searches)


class _Search:
    """Beginnings that go on and answers that have ended, of each row of a batch."""

    def __init__(
        self, batch: int, beams: int, length: int, pad: int, ends: Tensor, early: bool | str, device: torch.device
    ) -> None:
        self.beams, self.ends, self.pad, self.early = beams, ends, pad, early
        self.running = torch.empty(batch, beams, 0, dtype=torch.long, device=device)
        self.scores = torch.full((batch, beams), NEVER, device=device)
        self.scores[:, 0] = 0.0  # all beams begin alike: one stands for them
        self.answers = torch.full((batch, beams, length), pad, dtype=torch.long, device=device)
        self.lengths = torch.zeros(batch, beams, dtype=torch.long, device=device)
        self.values = torch.full((batch, beams), NEVER, device=device)
        self.full = torch.zeros(batch, beams, dtype=torch.bool, device=device)
        self.open = torch.ones(batch, 1, dtype=torch.bool, device=device)  # the search goes on

    def step(self, scores: Tensor, divisor: float, furthest: float, *, last: bool) -> Tensor:
        """One token more, from the scores (B, K, V) of each; which beams (B, K) those that go on come from."""
        classes = scores.size(-1)
        totals = (self.scores[:, :, None] + scores).flatten(1)  # (B, K·V)
        keep = self.beams * max(2, 1 + len(self.ends))
        best, places = totals.topk(min(keep, totals.size(1)))
        parents, tokens = places // classes, places % classes
        candidates = torch.cat([_take(self.running, parents), tokens[:, :, None]], 2)
        ended = torch.isin(tokens, self.ends)
        self._finish(candidates, best / divisor, ended | last)
        chosen = self._go_on(candidates, best, ended)
        self._look_ahead(furthest)
        self.open &= ~(ended | last).all(1, keepdim=True)
        return parents.gather(1, chosen)

    def _finish(self, candidates: Tensor, values: Tensor, ended: Tensor) -> None:
        """Put what has ended among the answers, if it is better than those there are."""
        new = ended & (torch.arange(ended.size(1), device=ended.device) < self.beams)
        values = values + NEVER * ~self.open + NEVER * ~new
        count = candidates.size(2)
        answers = torch.nn.functional.pad(candidates, (0, self.answers.size(2) - count), value=self.pad)
        merged = torch.cat([self.values, values], 1)
        self.values, best = merged.topk(self.beams)
        self.answers = _take(torch.cat([self.answers, answers], 1), best)
        self.full = torch.cat([self.full, new], 1).gather(1, best)
        self.lengths = torch.cat([self.lengths, torch.full_like(best.new_empty(new.shape), count)], 1).gather(1, best)

    def _go_on(self, candidates: Tensor, scores: Tensor, ended: Tensor) -> Tensor:
        """Keep the best that have not ended; which candidates they are."""
        self.scores, chosen = (scores + NEVER * ended).topk(self.beams)
        self.running = _take(candidates, chosen)
        return chosen

    def _look_ahead(self, divisor: float) -> None:
        """A row goes on while its best beginning could beat its worst answer, or some answer is missing."""
        worst = torch.where(self.full, self.values.amin(1, keepdim=True), NEVER)
        self.open = self.open & (self.scores[:, :1] / divisor > worst).any(1, keepdim=True)
        if self.early is True:
            self.open &= ~self.full.all(1, keepdim=True)


def _best(searches: list[_Search]) -> Beams:
    """The answers of all groups, best first."""
    values, order = torch.cat([search.values for search in searches], 1).sort(descending=True, stable=True)
    lengths = torch.cat([search.lengths for search in searches], 1).gather(1, order)
    answers = _take(torch.cat([search.answers for search in searches], 1), order)
    return Beams(answers[:, :, : int(lengths.max())], values, lengths)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of (B, K, N) by places (B, M): (B, M, N)."""
    return values.gather(1, places[:, :, None].expand(-1, -1, values.size(2)))
