"""From the model's scores to the next token: adjusted as the options say, then the likeliest, or one drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Generator, Tensor

from ..models import Model
from . import sampling
from .options import Options, Text, adjuster
from .replay import Recorder

SAID = {"forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"}  # settings that change what is chosen


class Chooser:
    """From scores (B, V) to tokens (B,)."""

    def __init__(self, batch: int, options: Options, recorder: Recorder | None = None) -> None:
        self.options, self._recorder = options, recorder
        # One generator for each row: with a seed, all from the same one, so that a row draws as it would alone.
        seeds = [options.seed if options.seed is not None else _any_seed() for _ in range(batch)]
        self.generators = [Generator().manual_seed(seed) for seed in seeds] if options.temperature else []

    def __call__(self, scores: Tensor) -> Tensor:
        if not self.options.temperature:
            return scores.argmax(-1)
        numbers = sampling.numbers(self.generators).to(scores.device)
        if self._recorder is None:
            return self._draw(scores, numbers)
        return self._recorder("draw", self._draw, scores, numbers)

    def _draw(self, scores: Tensor, numbers: Tensor) -> Tensor:
        options = self.options
        scores = sampling.temperature(scores, options.temperature)
        if options.top_k is not None:
            scores = sampling.top_k(scores, options.top_k)
        if options.top_p is not None:
            scores = sampling.top_p(scores, options.top_p)
        if options.min_p is not None:
            scores = sampling.min_p(scores, options.min_p)
        if options.typical_p is not None:
            scores = sampling.typical(scores, options.typical_p)
        return sampling.pick(scores, numbers)

    def follow(self, other: Self) -> None:
        """Draw from here on what the other one will draw."""
        for mine, its in zip(self.generators, other.generators, strict=True):
            mine.set_state(its.get_state())


class RowChooser:
    """The next token of one text, as it would be chosen if that were the only one."""

    def __init__(self, model: Model, prompt: Sequence[int], options: Options) -> None:
        plain = Options(max_new_tokens=1, eos_id=options.eos_id)
        asked = replace(options, max_new_tokens=1, seed=None, compile=False)
        self.greedy = asked == plain and not SAID & set(model.generation)
        ids = torch.tensor([[*prompt]], device=model.device)
        self._adjust = adjuster(model, Text(ids, torch.ones_like(ids, dtype=torch.bool)), options)
        self._choose = Chooser(1, options)

    def __call__(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """From logits (V,) after the prompt and these tokens of the answer to the next one, ()."""
        if self.greedy:
            return logits.argmax()
        new = torch.tensor([[*tokens]], dtype=torch.long, device=logits.device)
        return self._choose(self._adjust(logits[None].float(), new))[0]

    def follow(self, other: Self) -> None:
        self._choose.follow(other._choose)


def _any_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))
