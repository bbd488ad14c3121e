"""Tokens in, the logits of each next token out."""

from __future__ import annotations

from torch import Tensor

from ..config import ModelConfig
from ..core.cache import Cache
from ..core.layout import Layout, Packing
from ..core.stack import Stack
from .model import Model


class Decoder(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.decoder = Stack(config, "decoder")
        self.tie(self.decoder.embeddings.tokens.weight)

    def features(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, packing: Packing | None = None
    ) -> Tensor:
        """`mask` is that of `ids` alone; a cache remembers which of the tokens before were real."""
        past = None if cache is None else cache.lengths
        return self.decoder(ids, Layout.of(ids, mask, packing, past), cache=cache)

    def forward(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, packing: Packing | None = None
    ) -> Tensor:
        """`ids` (B, T), or (N,) with a packing, to logits (B, T, V) or (N, V)."""
        return self.head(self.features(ids, mask=mask, cache=cache, packing=packing))
