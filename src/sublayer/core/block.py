"""One layer: sublayers, each inside a residual connection with its norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..config import ModelConfig
from .attention import Attention
from .cache import CrossEntry, Entry
from .feedforward import FeedForward
from .layers import Dropout
from .masks import Mask
from .norm import make_norm


class Residual(nn.Module):
    """x + Sublayer(x), and the one decision of where the norm goes.

    post      Norm(x + Sublayer(x))            the original
    pre       x + Sublayer(Norm(x))
    deep      Norm(α·x + Sublayer(x))          DeepNorm (Wang et al. 2022)
    sandwich  x + Norm(Sublayer(Norm(x)))      (Ding et al. 2021)
    """

    def __init__(self, sublayer: nn.Module, config: ModelConfig, side: str) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = make_norm(config)
        self.outer_norm = make_norm(config) if config.placement == "sandwich" else None
        self.before = config.placement in ("pre", "sandwich")
        self.alpha = config.deepnorm(side)[0]
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, valid: Tensor | None = None, **inputs: Any) -> Tensor:
        if not self.before:
            branch = self.dropout(self.sublayer(x, **inputs))
            return self.norm((x if self.alpha == 1.0 else x * self.alpha) + branch, valid)
        branch = self.sublayer(self.norm(x, valid), **inputs)
        if self.outer_norm is not None:
            branch = self.outer_norm(branch, valid)
        return x + self.dropout(branch)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, side: str) -> None:
        super().__init__()
        self.attention = Residual(Attention(config), config, side)
        has_cross = side == "decoder" and config.shape == "encoder-decoder"
        self.cross = Residual(Attention(config), config, side) if has_cross else None
        self.feed_forward = Residual(FeedForward(config), config, side)

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        mask: Mask | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Entry | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        memory_cache: CrossEntry | None = None,
        first: bool = False,
    ) -> Tensor:
        """With `first`, the answer for the first token alone; of the others, keys and values are all that it needs."""
        if first:
            source = self.attention.norm(x, valid) if self.attention.before else x
            return self.feed_forward(self.attention(x[:, :1], memory=source, mask=mask))
        x = self.attention(x, valid, mask=mask, rotary=rotary, cache=cache)
        if self.cross is not None:
            x = self.cross(x, valid, memory=memory, mask=memory_mask, cache=memory_cache)
        return self.feed_forward(x, valid)
