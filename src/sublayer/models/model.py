"""What the three shapes have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config import ModelConfig
from ..core.cache import Cache
from ..core.heads import LanguageModel, MaskedLanguageModel, make_head
from ..core.kernels import HALF
from ..core.quantized import Quantized


class Model(nn.Module):
    """`features(...)` gives what the head reads, `head` turns it into logits; calling the model does both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # What it was loaded from: config.json and generation_config.json as they were.
        self.origin: dict[str, Any] | None = None
        self.source: str | None = None  # the folder, or the name on the hub
        self.generation: dict[str, Any] = {}
        self.labels: tuple[str, ...] = ()  # what the classes of a classifier are called
        self.head = make_head(config)

    def tie(self, tokens: nn.Parameter) -> None:
        """Let the output matrix be the token matrix, where the configuration says so."""
        if self.config.tie_embeddings and isinstance(self.head, LanguageModel | MaskedLanguageModel):
            self.head.logits.weight = tokens

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        """Each parameter once, however many places use it."""
        coded = (part.in_features * part.out_features for part in self.modules() if isinstance(part, Quantized))
        return sum(parameter.numel() for parameter in self.parameters()) + sum(coded)

    def make_cache(self, batch: int, capacity: int, chunk: int | None = None) -> Cache:
        """Room for the keys and values of `capacity` tokens in each of `batch` rows.

        Who says how many tokens a step has at most gets by with less in layers that look only a window far.
        """
        if self.config.shape == "encoder":
            raise ValueError("an encoder sees all tokens at once and keeps no cache")
        return Cache(self.config, batch, capacity, chunk=chunk, device=self.device, dtype=self.cache_dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        """On a CPU attention is several times as fast in float32 as in anything less, and a cache is kept in that."""
        return torch.float32 if self.device.type == "cpu" and self.dtype in HALF else self.dtype
