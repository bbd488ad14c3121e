"""A layer and its adapter in one product, where many tokens come at once on a CPU.

Beside the layer, an adapter costs two narrow products, a scaling and a sum over all tokens, and as much again on the
way back. W + scale · B·A is small next to a batch: made first, it leaves one product of the usual size each way. On a
GPU narrow products cost little more than their launching, and this has more to launch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.layers import product_type, without_autocast

LEAST = 64  # tokens for which the sum of matrices pays


def can_join(x: Tensor, weight: Tensor, a: Tensor) -> bool:
    """Only where weight and adapter are in full precision: in less, the sum would round the adapter away for good."""
    return (
        x.device.type == "cpu"
        and weight.dtype == a.dtype
        and a.dtype in (torch.float32, torch.float64)
        and (x.dtype == a.dtype or product_type(x) is not None)
        and not weight.requires_grad
        and (a.requires_grad or not torch.is_grad_enabled())
        and x.numel() >= LEAST * x.size(-1)
        and not torch.compiler.is_compiling()
    )


def joined(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x·(W + scale · B·A)ᵀ + bias, with gradients for x, A and B. Under autocast it is the sum that is rounded."""
    dtype = product_type(x) or x.dtype
    with without_autocast(x):
        bias = None if bias is None else bias.to(dtype)
        out: Tensor = _Joined.apply(x.to(dtype), weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
        return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, torch.addmm(weight, b, a, alpha=scale).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        with without_autocast(x):
            whole = torch.addmm(weight, b, a, alpha=ctx.scale).to(x.dtype) if ctx.needs_input_grad[0] else None
            back = None if whole is None else gradient @ whole
            rows, errors = x.flatten(0, -2), gradient.flatten(0, -2)
            # With the few rows of the adapter first, such products take half as long as with its few columns last.
            back_a = (b.to(x.dtype).T @ errors.T).mul_(ctx.scale) @ rows
            back_b = (a.to(x.dtype) @ rows.T).mul_(ctx.scale) @ errors
        return back, None, None, back_a.to(a.dtype), back_b.to(b.dtype).T, None
