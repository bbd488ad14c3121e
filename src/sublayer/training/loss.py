"""Cross-entropy over a large vocabulary, without ever holding more than a chunk of the logits.

The gradient of cross-entropy is known as soon as the logits are: softmax minus the target. So each chunk of rows is
taken through the output matrix, to its loss, and back to the gradients of features and matrix, before the next one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits held at once: few, yet rows enough for a good matrix product.
CHUNK_ELEMENTS = {"cpu": 1 << 27, "cuda": 1 << 29}

HAS_ONE_DNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
ONE_DNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if HAS_ONE_DNN else None


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    chunk: int | None = None,
    ignored: bool = False,
) -> Tensor:
    """The sum over rows of the cross-entropy of softmax(features·weightᵀ + bias) with the labels.

    `features` (N, D), `weight` (V, D), `labels` (N,). With `ignored`, rows may have a negative label and then count
    nothing. Smoothing spreads its mass over all V, as torch does.
    """
    if features.size(0) == 0:
        return features.sum() * 0.0
    dtype = features.dtype
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    chunk = chunk or max(64, CHUNK_ELEMENTS.get(kind, 1 << 27) // weight.size(0))
    with torch.autocast(kind, enabled=False):  # the types are chosen here, and the loss itself is in float32
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            features, weight, bias, labels, smoothing, chunk, dtype, ignored
        )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        chunk: int,
        dtype: torch.dtype,
        ignored: bool,
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        rows, classes = features.size(0), weight.size(0)
        x, matrix = features.to(dtype), weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=features.device)
        grad_x = torch.empty_like(x) if wanted[0] else None
        grad_weight = torch.empty_like(weight) if wanted[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        # What smoothing takes from every class is the same for every row, and so need not pass through the logits.
        share = smoothing / classes
        column_sum = matrix.sum(0) * share if smoothing else None
        counts = (labels >= 0).to(dtype)[:, None] if ignored else x.new_ones(1, 1).expand(rows, 1)
        labels = labels.clamp(min=0) if ignored else labels
        for start in range(0, rows, chunk):
            part, target = x[start : start + chunk], labels[start : start + chunk]
            logits = _linear(part, matrix, None if bias is None else bias.to(dtype))
            counted = counts[start : start + chunk]
            losses, errors = _rows(logits, target, counted, smoothing, ignored)
            loss += losses
            if grad_x is not None:
                torch.mm(errors, matrix, out=grad_x[start : start + chunk])
                if column_sum is not None:
                    grad_x[start : start + chunk] -= column_sum * counted
            if grad_weight is not None:
                _accumulate(grad_weight, errors, part, first=start == 0)
            if grad_bias is not None:
                grad_bias += errors.sum(0, dtype=grad_bias.dtype) - share * counted.sum()
        if grad_weight is not None and smoothing:
            grad_weight -= share * (x * counts).sum(0, dtype=torch.float32)
        ctx.save_for_backward(None if grad_x is None else grad_x.to(features.dtype), grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad.mul_(grad_loss.to(grad.dtype)) for grad in ctx.saved_tensors]
        return (*grads, *[None] * (8 - len(grads)))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·weightᵀ + bias. For a wide matrix in float32, oneDNN's product is half as fast again as the usual one."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and ONE_DNN is not None:
        out: Tensor = ONE_DNN(x.contiguous(), weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _rows(logits: Tensor, target: Tensor, counted: Tensor, smoothing: float, ignored: bool) -> tuple[Tensor, Tensor]:
    """The summed loss of rows of logits, and softmax minus (1 - smoothing) at the target, in the logits' own type."""
    largest = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, target[:, None]).float()
    mean = logits.mean(-1, dtype=torch.float32) if smoothing else None
    probabilities = (
        logits.float().softmax(-1) if logits.dtype != torch.float32 else torch.softmax(logits, -1, out=logits)
    )
    # log Σ exp, from the largest: its probability is at least 1/V and never rounds to nothing.
    normaliser = largest.float() - probabilities.amax(-1, keepdim=True).log()
    losses = normaliser - chosen * (1 - smoothing)
    if mean is not None:
        losses = losses - smoothing * mean[:, None]
    errors = probabilities.to(logits.dtype)
    if ignored:
        errors.mul_(counted)
    errors.scatter_add_(-1, target[:, None], counted * (smoothing - 1.0))
    return (losses * counted).sum(), errors


def _accumulate(total: Tensor, errors: Tensor, part: Tensor, *, first: bool) -> None:
    if errors.dtype == total.dtype:
        total.addmm_(errors.t(), part, beta=0 if first else 1)
    elif first:
        total.copy_(errors.t() @ part)
    else:
        total += errors.t() @ part


@torch.no_grad()
def correct(features: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int | None = None) -> Tensor:
    """How many rows have their label as the likeliest, by chunks like the loss."""
    chunk = chunk or max(64, CHUNK_ELEMENTS.get(features.device.type, 1 << 27) // weight.size(0))
    hits = torch.zeros((), dtype=torch.long, device=features.device)
    for start in range(0, features.size(0), chunk):
        best = F.linear(features[start : start + chunk], weight, bias).argmax(-1)
        hits += best.eq(labels[start : start + chunk]).sum()
    return hits
