"""`generate`: new tokens for a decoder's prompt, or a target for an encoder-decoder's source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..config import ModelConfig
from ..models import Decoder, EncoderDecoder, Model
from . import sampling


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to choose tokens and when to stop; ids left at None are those of the model's configuration."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    eos_id: int | Sequence[int] | None = None
    pad_id: int | None = None
    start_id: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, fine, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 changes nothing)"),
        ):
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")


def generate(
    model: Model,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    start_id: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """New ids only, (B, N), padded after the end of each row. Temperature 0 takes the most likely token.

    `ids` (B, T) is the prompt of a decoder, padded on either side with `mask` False there, or the source of an
    encoder-decoder. Special ids left at None are those of the model's configuration.
    """
    options = Options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, eos_id=eos_id, pad_id=pad_id, start_id=start_id, seed=seed,
    )  # fmt: skip
    return torch.stack(list(stream(model, ids, options, mask=mask)), 1)


@torch.inference_mode()
def stream(model: Model, ids: Tensor, options: Options, *, mask: Tensor | None = None) -> Iterator[Tensor]:
    """The tokens (B,) that `generate` puts together, one step at a time."""
    ends = _ends(model.config.eos_id if options.eos_id is None else options.eos_id)
    pad = _pad(model.config.pad_id if options.pad_id is None else options.pad_id, ends)
    end_ids = torch.tensor(ends, device=ids.device, dtype=torch.long)
    choose = _chooser(ids.size(0), options)
    was_training = model.training
    model.eval()  # no dropout in an answer
    try:
        logits, step, seen = _begin(model, ids, mask, options)
        finished = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        for count in range(1, options.max_new_tokens + 1):
            scores = sampling.repetition_penalty(logits.float(), seen, options.repetition_penalty)
            token = torch.where(finished, pad, choose(scores))
            yield token
            finished = finished | torch.isin(token, end_ids)
            if count == options.max_new_tokens or bool(finished.all()):
                return
            seen.scatter_(-1, token[:, None], True)
            logits = step(token)
    finally:
        model.train(was_training)


def _begin(
    model: Model, ids: Tensor, mask: Tensor | None, options: Options
) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
    """The first logits, the function from a token to the next ones, and which ids (B, V) the text already has."""
    _check(model, ids, mask)
    batch = ids.size(0)
    if isinstance(model, Decoder):
        cache = model.make_cache(batch, ids.size(1) + options.max_new_tokens - 1)  # the last token is not fed back
        said, real = ids, torch.ones_like(ids) if mask is None else mask.long()
        logits = model.head(_last(model.features(ids, mask=mask, cache=cache), mask))

        def step(token: Tensor) -> Tensor:
            return model(token[:, None], cache=cache)[:, -1]

    elif isinstance(model, EncoderDecoder):
        cache = model.make_cache(batch, options.max_new_tokens)
        said = torch.full((batch, 1), _start(model.config, options.start_id), device=ids.device)
        real = torch.ones_like(said)
        logits = model(ids, said, source_mask=mask, cache=cache)[:, -1]

        def step(token: Tensor) -> Tensor:
            return model(None, token[:, None], cache=cache)[:, -1]

    else:
        raise AssertionError(model.config.shape)  # only these two have the head
    seen = torch.zeros_like(logits, dtype=torch.long).scatter_add_(-1, said, real) > 0
    return logits, step, seen


def _check(model: Model, ids: Tensor, mask: Tensor | None) -> None:
    if model.config.head != "lm":
        raise ValueError(f"head {model.config.head!r} gives no next token; generation needs a model with head 'lm'")
    if ids.dim() != 2 or ids.size(1) == 0:
        raise ValueError(f"ids have shape {tuple(ids.shape)}; expected (batch, tokens), at least one token each")
    if mask is not None and not bool(mask.any(1).all()):
        raise ValueError("a row of the mask has no real token; every prompt needs at least one")


def _last(features: Tensor, mask: Tensor | None) -> Tensor:
    """(B, D): the last real token of each row."""
    if mask is None:
        return features[:, -1]
    last = mask.size(1) - 1 - mask.flip(1).int().argmax(1)
    return features[torch.arange(features.size(0), device=features.device), last]


def _chooser(batch: int, options: Options) -> Callable[[Tensor], Tensor]:
    """The function from scores (B, V) to tokens (B,)."""
    if not options.temperature:
        return lambda scores: scores.argmax(-1)
    # One generator for each row: with a seed, all from the same one, so that a row draws as it would alone.
    seeds = [
        int(torch.randint(2**62, (), device="cpu")) if options.seed is None else options.seed for _ in range(batch)
    ]
    generators = [Generator().manual_seed(value) for value in seeds]

    def choose(scores: Tensor) -> Tensor:
        scores = sampling.temperature(scores, options.temperature)
        if options.top_k is not None:
            scores = sampling.top_k(scores, options.top_k)
        if options.top_p is not None:
            scores = sampling.top_p(scores, options.top_p)
        if options.min_p is not None:
            scores = sampling.min_p(scores, options.min_p)
        return sampling.draw(scores, generators)

    return choose


def _ends(eos: int | Sequence[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _pad(pad: int | None, ends: list[int]) -> int:
    return pad if pad is not None else ends[0] if ends else 0


def _start(config: ModelConfig, start_id: int | None) -> int:
    for candidate in (start_id, config.start_id, config.bos_id, config.pad_id):
        if candidate is not None:
            return candidate
    raise ValueError("the model's configuration has no start_id; give the id its decoder starts with")
