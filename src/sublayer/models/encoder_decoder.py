"""A source and the target so far in, the logits of each next target token out."""

from __future__ import annotations

from torch import Tensor

from ..config import ModelConfig
from ..core.cache import Cache
from ..core.layout import Layout, Packing
from ..core.stack import Stack
from .model import Model


class EncoderDecoder(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.encoder = Stack(config, "encoder")
        self.decoder = Stack(config, "decoder")
        if config.share_embeddings:
            self.decoder.embeddings.tokens.weight = self.encoder.embeddings.tokens.weight
        self.tie(self.decoder.embeddings.tokens.weight)

    def encode(self, source: Tensor, *, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.encoder(source, Layout.of(source, mask, packing))

    def features(
        self,
        source: Tensor | None,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        source_packing: Packing | None = None,
        target_packing: Packing | None = None,
    ) -> Tensor:
        memory, memory_layout = None, None
        if source is not None:
            memory_layout = Layout.of(source, source_mask, source_packing)
            memory = self.encoder(source, memory_layout)
        elif cache is None:
            raise ValueError("source is None; only a cache that has seen the source can do without it")
        past = None if cache is None else cache.lengths
        if cache is not None:
            memory_layout = cache.remember(memory_layout)
        layout = Layout.of(target, target_mask, target_packing, past)
        return self.decoder(target, layout, memory=memory, memory_layout=memory_layout, cache=cache)

    def forward(
        self,
        source: Tensor | None,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        cache: Cache | None = None,
        source_packing: Packing | None = None,
        target_packing: Packing | None = None,
    ) -> Tensor:
        """`source` (B, S) and `target` (B, T) to logits (B, T, V); packed, (N,) each to (N, V).

        With a cache the source is encoded in the first call; the calls after it give None.
        """
        features = self.features(
            source,
            target,
            source_mask=source_mask,
            target_mask=target_mask,
            cache=cache,
            source_packing=source_packing,
            target_packing=target_packing,
        )
        return self.head(features)
