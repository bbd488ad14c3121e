"""Sampling as a chain of small pure functions from logits (B, V) to logits, and from logits to ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens already in the text less likely; `seen` (B, V) says which. Negative logits are multiplied."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def temperature(logits: Tensor, value: float) -> Tensor:
    return logits / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most likely tokens."""
    smallest = logits.topk(min(k, logits.size(-1))).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities add up to p or more (nucleus sampling)."""
    ordered, order = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    keep = before < p
    keep[..., 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -torch.inf)


def draw(logits: Tensor, generators: Sequence[Generator]) -> Tensor:
    """(B,) ids; each row draws from its own generator, so its answer does not depend on the rows beside it."""
    points = torch.stack(
        [torch.rand((), generator=generator, device="cpu", dtype=torch.float64) for generator in generators]
    )
    cumulative = logits.double().softmax(-1).cumsum(-1)
    points = points.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return ids.clamp(max=logits.size(-1) - 1)
