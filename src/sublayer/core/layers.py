"""torch's own layers, which on the meta device draw no initial values, and its dropout.

A model is built there, and its values come from a checkpoint or from `models/build.py`. Drawing them would cost time in
every layer, and torch imports its whole compiler to draw nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """On a CPU sixteen random bits decide for each number; torch draws a whole one for it, which costs most of all."""
    cut = round(p * 2**16)  # of 2¹⁶ draws, those for which a number is dropped
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < cut < 2**16:
        return F.dropout(x, p)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= cut - 2**15
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - cut))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x·Wᵀ + b, by the packed weight if there is one."""
    if torch.compiler.is_compiling() and x.numel() == x.size(-1):
        # A compiler writes such a product out, and what x is made of with it, for each row of W. This says: x first.
        x = x.as_strided(x.size(), x.stride())
    if packed is None:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
