"""Linear layers whose weights only stand, in 4 or 8 bits: a large model with room beside it for an adapter.

QLoRA (Dettmers et al. 2023) keeps each weight as one of 16 quantiles of the normal distribution (NF4), times the
largest weight of its block of 64; those largest weights are again kept in 8 bits. With 8 bits for each weight, the
largest is that of its row. The codes and their arithmetic are bitsandbytes'.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear

BLOCK, SCALE_BLOCK = 64, 256  # weights with one scale, and scales with one scale of their own


class Quantized(nn.Linear):
    """In the place of a linear layer, and under its name. It does not learn; gradients pass through it to its input."""

    bits: int
    codes: Tensor

    def __init__(self, layer: nn.Linear, compute_dtype: torch.dtype | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.compute_dtype = compute_dtype
        self.requires_grad_(False).train(layer.training)

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the codes stand for, made anew."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.decode(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or (x.dtype if x.device.type == "cpu" else torch.bfloat16)
        bias = None if self.bias is None else self.bias.to(dtype)
        return self.product(x.to(dtype), bias).to(x.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return out

    def keep(self, **tensors: Tensor) -> None:
        """As buffers. Numbers are kept as their bits: model.bfloat16() would round floating-point buffers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.view(torch.int32) if tensor.is_floating_point() else tensor)


class NormalFloat4(Quantized):
    bits = 4
    scales: Tensor  # the largest weight of each block, or with `double` their codes
    scale_scales: Tensor
    scale_mean: Tensor
    scale_table: Tensor  # what the codes of scales stand for

    def __init__(
        self, layer: nn.Linear, weight: Tensor, *, double: bool, compute_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(layer, compute_dtype)
        codes, state = library().functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=double, quant_type="nf4"
        )
        self.keep(codes=codes, scales=state.absmax)
        if double:
            self.keep(scale_scales=state.state2.absmax, scale_mean=state.offset, scale_table=state.state2.code)

    def decode(self, dtype: torch.dtype) -> Tensor:
        # By rows of one block: with AVX-512, bitsandbytes 0.50 lets every row begin a block, also where it does not.
        count = self.in_features * self.out_features
        shape = (count // BLOCK, BLOCK) if count % BLOCK == 0 else (1, count)
        out: Tensor = library().functional.dequantize_4bit(self.codes, self._state(shape, dtype))
        return out.reshape(self.out_features, self.in_features)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cpu":
            return super().product(x, bias)
        shape = (self.out_features, self.in_features)
        out: Tensor = library().matmul_4bit(x, self.codes, self._state(shape, x.dtype), bias=bias)
        return out

    def _state(self, shape: tuple[int, int], dtype: torch.dtype) -> Any:
        """The statistics in the form in which bitsandbytes takes them."""
        state = library().functional.QuantState
        whole = functools.partial(state, shape=torch.Size(shape), dtype=dtype, blocksize=BLOCK, quant_type="nf4")
        if self.scales.dtype != torch.uint8:
            return whole(self.scales.view(torch.float32))
        scales, mean, table = (
            bits.view(torch.float32) for bits in (self.scale_scales, self.scale_mean, self.scale_table)
        )
        more = state(scales, code=table, dtype=torch.float32, blocksize=SCALE_BLOCK)
        return whole(self.scales, offset=mean, state2=more)


class Integer8(Quantized):
    bits = 8
    scales: Tensor  # the largest weight of each row

    def __init__(
        self, layer: nn.Linear, weight: Tensor, *, double: bool = False, compute_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(layer, compute_dtype)
        codes, scales, _ = library().functional.int8_vectorwise_quant(weight.to(torch.float16).contiguous())
        self.keep(codes=codes, scales=scales)

    def decode(self, dtype: torch.dtype) -> Tensor:
        out: Tensor = library().functional.int8_vectorwise_dequant(self.codes, self.scales.view(torch.float32))
        return out.to(dtype)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b that makes W anew for the backward pass, instead of keeping it until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Quantized) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.decode(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.decode(gradient.dtype), None, None


KINDS: dict[int, type[NormalFloat4] | type[Integer8]] = {4: NormalFloat4, 8: Integer8}


@torch.no_grad()
def quantize_blocks(
    model: nn.Module,
    bits: int,
    *,
    double: bool = True,
    compute_dtype: torch.dtype | None = None,
    skip: Container[str] = (),
    device: torch.device | None = None,
) -> None:
    """Hold the projections of attention and feed-forward in 4 or 8 bits; what else the model has stays as it is.

    With a device, each matrix goes there by itself, so that never more than one is there as a whole; then the rest.
    """
    if bits not in KINDS:
        raise ValueError(f"bits is {bits!r}; weights can be held in 4 bits or in 8")
    if bits_of(model) is not None:
        raise ValueError(f"the model's weights are in {bits_of(model)} bits already; load it anew to change that")
    for path in [path for path, part in model.named_modules() if type(part) is Linear and ".blocks." in path]:
        if path not in skip:
            layer = model.get_submodule(path)
            assert isinstance(layer, Linear)
            if layer.weight.dtype == torch.float64:
                raise ValueError("the model is in float64; only weights of 16 or 32 bits can be held in fewer")
            weight = layer.weight.to(device or layer.weight.device)
            model.set_submodule(path, KINDS[bits](layer, weight, double=double, compute_dtype=compute_dtype))
    model.to(device)


def bits_of(model: nn.Module) -> int | None:
    """In how many bits the weights are held, if not as floating-point numbers."""
    return next((part.bits for part in model.modules() if isinstance(part, Quantized)), None)


@functools.cache
def library() -> Any:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of kernels that are optional
    try:
        import bitsandbytes
    except ImportError:
        raise ValueError(
            "weights in 4 or 8 bits need the package 'bitsandbytes': pip install 'sublayer[qlora]'"
        ) from None
    finally:
        log.setLevel(level)
    return bitsandbytes
