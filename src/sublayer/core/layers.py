"""torch's own layers, which on the meta device draw no initial values; a quicker dropout; and what autocast asks for.

A model is built there, and its values come from a checkpoint or from `models/build.py`. Drawing them would cost time in
every layer, and torch imports its whole compiler to draw nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}  # as wide


class Linear(nn.Linear):
    packed: Tensor | None = None  # the weight in oneDNN's own order, while someone generates on a CPU

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """On a CPU torch draws a whole number for each element, which costs most of all; sixteen bits of a quick generator
    decide as well. It starts from torch's own, so that the same seed drops the same."""
    cut = round(p * 2**16)  # of 2¹⁶ draws, those for which a number is dropped
    words = WORDS.get(x.dtype)
    if words is None or x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < cut < 2**16:
        return F.dropout(x, p)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    drawn = np.random.SFC64(seed).random_raw(-(-x.numel() // 4)).view(np.int16)[: x.numel()]
    # 0 or 1, and then 0 or what has the bits of 1/(1-p): passes over integers, much quicker than those over halves.
    kept = torch.from_numpy(drawn).ge_(cut - 2**15).to(words)
    scale = torch.tensor(2**16 / (2**16 - cut), dtype=x.dtype, device="cpu").view(words)
    return x * kept.mul_(scale).view(x.dtype).view(x.shape)


def product_type(x: Tensor) -> torch.dtype | None:
    """What autocast computes products in, where it is on. The meta device has none."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else None


def product_input(x: Tensor) -> Tensor:
    """Under autocast, in the type of its products: once, instead of once for each layer that reads it."""
    dtype = product_type(x)
    return x if dtype is None or x.dtype != torch.float32 else x.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x·Wᵀ + b, by the packed weight if there is one."""
    if torch.compiler.is_compiling() and x.numel() == x.size(-1):
        # A compiler writes such a product out, and what x is made of with it, for each row of W. This says: x first.
        x = x.as_strided(x.size(), x.stride())
    if packed is None:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
