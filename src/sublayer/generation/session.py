"""A model at work on some texts: what it has read, and the logits of what comes next."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..models import Decoder, EncoderDecoder, Model


class Session:
    """Prompts (B, T) of a decoder, or sources of an encoder-decoder, read at once; then a token a row, step by step."""

    def __init__(
        self, model: Model, ids: Tensor, mask: Tensor | None, max_new_tokens: int, start_id: int | None = None
    ) -> None:
        check(model, ids, mask)
        self.model = model
        batch = ids.size(0)
        if isinstance(model, Decoder):
            self.cache = model.make_cache(batch, ids.size(1) + max_new_tokens - 1)  # the last token is not fed back
            self.said, self.real = ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            self.logits = model.head(_last(model.features(ids, mask=mask, cache=self.cache), mask))
        else:
            assert isinstance(model, EncoderDecoder)  # only these two have the head
            self.cache = model.make_cache(batch, max_new_tokens)
            self.said = torch.full((batch, 1), start_of(model.config, start_id), device=ids.device)
            self.real = torch.ones_like(self.said, dtype=torch.bool)
            self.logits = model(ids, self.said, source_mask=mask, cache=self.cache)[:, -1]

    def step(self, token: Tensor) -> Tensor:
        """The logits (B, V) after one more token (B,) in each row."""
        inputs = (token[:, None],) if isinstance(self.model, Decoder) else (None, token[:, None])
        logits: Tensor = self.model(*inputs, cache=self.cache)[:, -1]
        return logits

    def spread(self, times: int) -> None:
        """Each row several times over, next to each other; the source of an encoder-decoder stays as it is."""
        self.cache = self.cache.spread(times)

    def reorder(self, parents: Tensor) -> None:
        """Row r goes on from what row parents[r] has read."""
        self.cache.reorder(parents)


def check(model: Model, ids: Tensor, mask: Tensor | None) -> None:
    if model.config.head != "lm":
        raise ValueError(f"head {model.config.head!r} gives no next token; generation needs a model with head 'lm'")
    if ids.dim() != 2 or ids.size(1) == 0:
        raise ValueError(f"ids have shape {tuple(ids.shape)}; expected (batch, tokens), at least one token each")
    if mask is not None and not bool(mask.any(1).all()):
        raise ValueError("a row of the mask has no real token; every prompt needs at least one")


def start_of(config: ModelConfig, start_id: int | None) -> int:
    for candidate in (start_id, config.start_id, config.bos_id, config.pad_id):
        if candidate is not None:
            return candidate
    raise ValueError("the model's configuration has no start_id; give the id its decoder starts with")


def _last(features: Tensor, mask: Tensor | None) -> Tensor:
    """(B, D): the last real token of each row."""
    if mask is None:
        return features[:, -1]
    last = mask.size(1) - 1 - mask.flip(1).int().argmax(1)
    return features[torch.arange(features.size(0), device=features.device), last]
