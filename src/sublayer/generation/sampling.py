"""Sampling as a chain of small pure functions from logits (B, V) to logits, and from logits to ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens already in the text less likely; `seen` (B, V) says which. Negative logits are multiplied."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_and_frequency(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """OpenAI's penalties: `presence` off what the answer has, `frequency` for every time it has it; `counts` (B, V)."""
    return logits - presence * (counts > 0) - frequency * counts


def no_repeat_ngrams(logits: Tensor, texts: Sequence[Sequence[int]], size: int) -> Tensor:
    """Forbid what would complete a run of `size` tokens that a text already has."""
    logits = logits.clone()
    for row, text in enumerate(texts):
        begun = tuple(text[len(text) - size + 1 :]) if size > 1 else ()
        runs = zip(*(text[shift:] for shift in range(size)), strict=False)
        banned = [run[-1] for run in runs if run[:-1] == begun] if len(text) >= size - 1 else []
        logits[row, banned] = -torch.inf
    return logits


def bias(logits: Tensor, amounts: Mapping[int, float]) -> Tensor:
    """Add to the logits of some tokens; -inf forbids one."""
    if not amounts:
        return logits
    logits = logits.clone()
    logits[:, list(amounts)] += torch.tensor(list(amounts.values()), device=logits.device, dtype=logits.dtype)
    return logits


def force(logits: Tensor, token: int) -> Tensor:
    """Leave one token only."""
    out = torch.full_like(logits, -torch.inf)
    out[:, token] = 0.0
    return out


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


def typical(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, until they add up to p (Meister et al. 2022)."""
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    expected = -(probabilities * logs.masked_fill(probabilities == 0, 0.0)).sum(-1, keepdim=True)
    distance = (-logs - expected).abs()
    ordered, order = distance.sort()
    needed = (probabilities.gather(-1, order).cumsum(-1) < p).sum(-1, keepdim=True).clamp(max=logits.size(-1) - 1)
    return logits.masked_fill(distance > ordered.gather(-1, needed), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -torch.inf)


def numbers(generators: Sequence[Generator]) -> Tensor:
    """(B,), on the CPU: what decides over the next token of each row. Each has a generator of its own, so that its
    answer does not depend on the rows beside it."""
    return torch.stack([torch.randint(2**62, (), generator=one, device="cpu") for one in generators])


def pick(logits: Tensor, numbers: Tensor) -> Tensor:
    """The tokens (B,) that these numbers (B,) stand for.

    The token with the least −log u / p wins, which is each with its probability p. Every token has a u of its own, so
    another rounding of p, as in a batch of another size, changes the winner only where two were that close. One number
    looked up in the sums of all p would be at some boundary far more often.
    """
    ids = torch.arange(logits.size(-1), device=logits.device)
    if logits.device.type == "cpu":  # look only at tokens that are left in some row; a GPU would have to wait for that
        ids = (logits > -torch.inf).any(0).nonzero().squeeze(1)
    waits = -_uniform(numbers[:, None], ids).log()
    return ids[(waits / logits[:, ids].double().softmax(-1)).argmin(-1)]


def _uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """A number between 0 and 1 for each key and id: splitmix64 (Steele et al. 2014), of which 52 bits are taken."""
    bits = keys + (ids + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return (_shifted(bits ^ _shifted(bits, 31), 12).double() + 0.5) / 2**52


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
