"""Positions, at the place where each kind acts: added to the embeddings, turning queries and keys, or as a bias."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig, RotaryScaling
from .layers import without_autocast
from .layout import Layout


class Sinusoidal(nn.Module):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    As a block, all sines come first and then all cosines.
    """

    table: Tensor

    def __init__(self, length: int, width: int, block: bool = False) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("table", torch.empty(length, width), persistent=False)

    def derive(self) -> None:
        length, width = self.table.shape
        device = self.table.device
        places = torch.arange(length, dtype=torch.float64, device=device)
        rates = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        angles = places[:, None] * rates
        pair = (angles.sin(), angles.cos())
        self.table.copy_(torch.cat(pair, -1) if self.block else torch.stack(pair, -1).flatten(1))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.table)


class Learned(nn.Module):
    """A trained row for each position; some families keep `offset` unused rows in front."""

    def __init__(self, length: int, width: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, width))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions + self.offset, self.weight)


class Rotary(nn.Module):
    """cos and sin of position × rate for each pair of dimensions (Su et al. 2021), in the half-split layout."""

    bits: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dim, self.base, self.scaling = config.rotary_dim, config.rotary_base, config.rotary_scaling
        self.max_positions = config.max_positions
        self.magnitude = _magnitude(self.scaling)
        # The rates are kept as the bits of float32 numbers: model.bfloat16() would round floating-point buffers, and
        # an angle of a few thousand radians with eight bits of precision is noise.
        self.register_buffer("bits", torch.empty(self.dim // 2, dtype=torch.int32), persistent=False)

    def derive(self) -> None:
        rates = rotary_rates(self.dim, self.base, self.scaling)
        self.bits.copy_(rates.view(torch.int32))

    def forward(self, layout: Layout) -> tuple[Tensor, Tensor]:
        rates = self.bits.view(torch.float32)
        if self.scaling is not None and self.scaling.kind == "dynamic":
            rates = self._dynamic_rates(rates, layout.lengths, self.scaling.factor)
        with without_autocast(self.bits):
            angles = layout.positions[..., None].float() * rates  # (..., T, E/2)
            return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def _dynamic_rates(self, rates: Tensor, lengths: Tensor, factor: float) -> Tensor:
        """NTK-aware: the base grows with the sequence, once that is longer than the length trained on."""
        stretch = factor * lengths.clamp(min=self.max_positions).float() / self.max_positions - (factor - 1)
        # base · stretch^(d/(d-2)), raised to -2i/d, is the old rate times stretch^(-2i/(d-2))
        powers = torch.arange(0, self.dim, 2, device=rates.device).float() / (self.dim - 2)
        return rates * stretch[..., None] ** -powers


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of the first rotary dimensions of x (..., T, H, E) by its angle."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rotary)  # (..., T, 1, half)
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def rotary_rates(dim: int, base: float, scaling: RotaryScaling | None) -> Tensor:
    """(dim / 2,) float32, on the CPU: base^(-2i/dim), stretched as the scaling says."""
    rates: Tensor = 1.0 / (base ** (torch.arange(0, dim, 2, device="cpu").float() / dim))
    if scaling is None or scaling.kind == "dynamic":
        return rates
    stretched = rates / scaling.factor
    if scaling.kind == "linear":
        return stretched
    trained = float(scaling.original_max_positions or 0)
    if scaling.kind == "llama3":
        turns = trained * rates / (2 * math.pi)  # over the length trained on
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        keep = 1 - _yarn_ramp(dim, base, trained, scaling)
    keep = keep.clamp(0, 1)
    return stretched * (1 - keep) + rates * keep


def _yarn_ramp(dim: int, base: float, trained: float, scaling: RotaryScaling) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension that makes this many turns over the length trained on."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return (torch.arange(dim // 2, device="cpu").float() - low) / (high - low)


def _magnitude(scaling: RotaryScaling | None) -> float:
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


class RelativeBias(nn.Module):
    """T5's bias: one number a head for each bucket of distance, exact when near and logarithmic when far."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.num_heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions (..., T) and (..., S) to a bias (..., H, T, S)."""
        buckets = self.buckets(keys[..., None, :] - queries[..., :, None])
        return F.embedding(buckets, self.weight).movedim(-1, -3)

    def buckets(self, offset: Tensor) -> Tensor:
        """`offset` is the key's position minus the query's."""
        count = self.weight.size(0)
        start = torch.zeros_like(offset)
        if self.causal:
            distance = (-offset).clamp(min=0)
        else:
            count //= 2
            start = (offset > 0).long() * count
            distance = offset.abs()
        exact = count // 2
        growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return start + torch.where(distance < exact, distance, far)


class Alibi(nn.Module):
    """-slope × distance, with slopes in a geometric series over the heads (Press et al. 2022)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (keys[..., None, :] - queries[..., :, None]).abs()
        slopes = alibi_slopes(self.num_heads, distance.device)
        return -slopes[:, None, None] * distance.unsqueeze(-3).float()  # (..., H, T, S)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """2^(-8i/n) for n heads; for other than a power of two, every second slope of the next one fills the rest."""
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = (torch.arange(power, device=device) + 1) * (8 / power)
    extra = (2 * torch.arange(num_heads - power, device=device) + 1) * (4 / power)
    return torch.exp2(-torch.cat((exponents, extra)))


def added_positions(config: ModelConfig, length: int, offset: int = 0) -> Learned | Sinusoidal | None:
    """The positions that are added to the embeddings, or None where they act elsewhere."""
    if config.positions == "learned":
        return Learned(length, config.d_model, offset)
    if config.positions.startswith("sinusoidal"):
        return Sinusoidal(length, config.d_model, block=config.positions == "sinusoidal-block")
    return None


def position_bias(config: ModelConfig, causal: bool) -> nn.Module | None:
    """The positions that are a bias on the attention scores, or None."""
    if config.positions == "relative":
        return RelativeBias(config, causal)
    return Alibi(config.num_heads) if config.positions == "alibi" else None
