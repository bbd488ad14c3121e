"""Norms. Each is called with the tokens and, for the one that looks across tokens, which of them are real."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight (Zhang and Sennrich 2019), computed in float32 whatever the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if x.dtype != self.weight.dtype:  # autocast: a half-precision branch beside float32 weights
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class BatchNorm(nn.Module):
    """Statistics over the valid tokens of the batch in training, running statistics in evaluation."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        mean, var = self._batch_statistics(x, valid) if self.training else (self.running_mean, self.running_var)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return (x * scale + (self.bias - mean * scale)).to(x.dtype)

    def _batch_statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2).float()
        # A sum with zero weights instead of a selection: the shape does not depend on the data, so it compiles.
        real = tokens.new_ones(tokens.size(0), 1) if valid is None else valid.reshape(-1, 1).to(tokens.dtype)
        count = real.sum().clamp(min=1)
        mean = (tokens * real).sum(0) / count
        var = ((tokens - mean).square() * real).sum(0) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, var


class NoNorm(nn.Module):
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, config.norm_bias)
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps)
    if config.norm == "batchnorm":
        return BatchNorm(config.d_model, config.norm_eps)
    return NoNorm()
