"""A layer and its adapter in one product, while the adapter learns.

Beside the layer, an adapter costs two narrow products, a scaling and a sum over all tokens, and as much again on the
way back. W + scale · B·A is small next to a batch: made first, it leaves one product of the usual size each way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST = 64  # tokens for which the sum of matrices pays


def can_join(x: Tensor, weight: Tensor, a: Tensor) -> bool:
    """Only in one full-precision dtype: in less, the sum would round the adapter away."""
    return (
        torch.is_grad_enabled()
        and x.dtype == weight.dtype == a.dtype
        and a.dtype in (torch.float32, torch.float64)
        and not weight.requires_grad
        and a.requires_grad
        and x.numel() >= LEAST * x.size(-1)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
    )


def joined(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x·(W + scale · B·A)ᵀ + bias, with gradients for x, A and B."""
    out: Tensor = _Joined.apply(x, weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        back = gradient @ torch.addmm(weight, b, a, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        rows, errors = x.flatten(0, -2), gradient.flatten(0, -2)
        back_a = (errors @ b).mul_(ctx.scale).T @ rows
        back_b = errors.T @ (rows @ a.T).mul_(ctx.scale)
        return back, None, None, back_a, back_b, None
