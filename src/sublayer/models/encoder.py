"""Tokens, or an image, in; a vector for each token, or what the head makes of them, out."""

from __future__ import annotations

from torch import Tensor

from ..config import ModelConfig
from ..core.layout import Layout, Packing
from ..core.stack import Stack
from .model import Model


class Encoder(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.encoder = Stack(config, "encoder")
        if not config.image_input:
            self.tie(self.encoder.embeddings.tokens.weight)

    def features(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        packing: Packing | None = None,
        first: bool = False,
    ) -> Tensor:
        """`first`: of each row, whose padding is behind, the first token is all that is wanted."""
        if self.config.image_input:
            if mask is not None or token_types is not None or packing is not None:
                raise ValueError("an image has no padding and no segments; give the pixels alone")
            return self.encoder(ids, first=first)
        return self.encoder(ids, Layout.of(ids, mask, packing), token_types=token_types, first=first)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """`ids` (B, T), or (N,) with a packing; pixels (B, C, height, width) for a model that reads images."""
        features = self.features(ids, mask=mask, token_types=token_types, packing=packing)
        return self.head(features, mask, packing)
