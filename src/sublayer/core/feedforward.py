"""The position-wise sublayer: down(activation(up(x))), or with a gate down(activation(gate(x)) · up(x))."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .layers import Dropout, Linear, product_input


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": _gelu_tanh,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.d_ff, bias=config.ffn_bias)
        self.gate = Linear(config.d_model, config.d_ff, bias=config.ffn_bias) if config.gated else None
        self.down = Linear(config.d_ff, config.d_model, bias=config.ffn_bias)
        self.activation = ACTIVATION[config.activation]
        self.dropout = Dropout(config.ffn_dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = product_input(x)
        up = self.up(x)  # (..., F)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        return self.down(self.dropout(hidden))
