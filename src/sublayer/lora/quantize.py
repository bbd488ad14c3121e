"""A frozen base in fewer bits (QLoRA): quantise first, then put the adapter around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.quantized import quantize_blocks
from ..models import Model, parse_dtype
from .targets import Names


def quantize(
    model: Model,
    bits: int = 4,
    *,
    double: bool = True,
    compute_dtype: torch.dtype | str | None = None,
    skip: str | Sequence[str] = (),
    device: torch.device | str | None = None,
) -> None:
    """Hold every projection of attention and feed-forward in 4 bits (NF4) or in 8; embeddings, norms and heads stay.

    `double` also keeps the scales of NF4 in 8 bits. Products are computed in `compute_dtype`: None is bfloat16, and on
    a CPU what the model is in. `skip` names layers that stay as they are, in the words of `targets` in `add`. With
    `device` the model goes there, one matrix at a time. The weights as they were are let go.
    """
    if getattr(model, "adapters", None) is not None:
        raise ValueError("the model has adapters; quantise it first, then add or load them")
    quantize_blocks(
        model,
        bits,
        double=double,
        compute_dtype=parse_dtype(compute_dtype),
        skip=Names.of(model).targets(skip) if skip else (),
        device=None if device is None else torch.device(device),
    )
