"""How much of the machine a training step uses: the operations it needs over the rate of a plain matrix product."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..core.attention import Attention
from ..core.heads import Logits, NoHead, PooledVector, SequenceClassifier
from ..core.stack import Stack

LARGEST = {"cpu": 2048, "cuda": 8192}
PATIENCE = 0.2  # seconds for the measurement proper; finding the size costs less than that again


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product, measured: the rate a model made of such products can hope for.

    The size doubles until one product is long enough to time, so that a slow machine does not wait for a large one.
    The numbers come from a generator of their own: a run draws the same ones whether or not it is measured.
    """
    size, seconds = 256, 0.0
    while True:
        left, right = _operands(size, device, dtype)
        _product_time(left, right)  # the first of a size pays for choosing a kernel
        seconds = _product_time(left, right)
        if seconds > 0.01 or size >= LARGEST.get(device.type, 4096):
            break
        size *= 2
    deadline = time.perf_counter() + PATIENCE
    while time.perf_counter() < deadline:
        seconds = min(seconds, _product_time(left, right))
    return 2 * size**3 / seconds


def _operands(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return left, right


def _product_time(left: Tensor, right: Tensor) -> float:
    _finish(left.device)
    start = time.perf_counter()
    left @ right
    _finish(left.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def flops_per_token(config: ModelConfig, parameters: int, length: float) -> float:
    """6·N + 12·L·H·E·T for a model of one stack, forward and backward (PaLM, appendix B).

    N counts what is multiplied: no embedding or position tables, but the output matrix, tied or not. A causal model is
    counted as if each token saw all T, as is the custom.
    """
    layers = config.num_encoder_layers + config.num_decoder_layers
    return 6.0 * parameters + attention_flops(config, length, layers)


def attention_flops(config: ModelConfig, length: float, layers: int = 1) -> float:
    """Scores and weighted sum for one query over `length` keys: two products forward, four backward, 2 FLOPs each."""
    return 12.0 * layers * config.num_heads * config.head_size * length


def flops(model: nn.Module, config: ModelConfig, tokens: dict[str, int], lengths: dict[str, float]) -> float:
    """The operations of one training step, forward and backward, over this many tokens (padding left out).

    An encoder reads the tokens called "source", a decoder those called "target"; `lengths` has the mean length of a
    sequence of each. In an encoder-decoder the cross-attention makes keys and values of source tokens, and all the rest
    of the decoder, and the output matrix, works on target tokens.
    """
    total = 0.0
    stacks = [part for part in model.modules() if isinstance(part, Stack)]
    for stack in stacks:
        side = "target" if stack.causal else "source"
        attention = sum(attention_flops(config, reach) for reach in _reaches(stack, lengths[side]))
        total += tokens[side] * (6 * weights(stack.blocks.modules()) + attention)
        # The class token is none of the patches, and pixels want no gradient: one product less.
        patches = sum(part.weight.numel() for part in stack.embeddings.modules() if isinstance(part, nn.Conv2d))
        total += 4 * patches * (tokens[side] - tokens[side] / lengths[side])
        for block in stack.blocks:
            if isinstance(block.cross, nn.Module):
                total += 6 * (tokens["source"] - tokens["target"]) * weights(_source_side(block.cross))
                total += tokens["target"] * attention_flops(config, lengths["source"])
    side = "target" if any(stack.causal for stack in stacks) else "source"
    return total + _head_flops(model, stacks, tokens[side], lengths[side])


def _head_flops(model: nn.Module, stacks: list[Stack], tokens: int, length: float) -> float:
    """A pooled head works once for a sequence, every other for each token."""
    within = {id(part) for stack in stacks for part in stack.modules()}
    head = [part for part in model.modules() if id(part) not in within]
    if any(isinstance(part, NoHead) for part in head):
        return 0.0
    pooled = any(isinstance(part, PooledVector | SequenceClassifier) for part in head)
    return 6 * weights(head) * (tokens / length if pooled else tokens)


def weights(parts: Iterable[nn.Module]) -> int:
    """The numbers in the matrices that a token's vector is multiplied with."""
    return sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear | Logits))


def _source_side(cross: nn.Module) -> list[nn.Module]:
    return [matrix for part in cross.modules() if isinstance(part, Attention) for matrix in (part.key, part.value)]


def _reaches(stack: Stack, length: float) -> list[float]:
    """How many keys a token of each layer looks at: all of its sequence, or those in its window."""
    widths = [window if window is None or stack.causal else 2 * window - 1 for window in stack.windows]
    return [length if width is None else min(length, width) for width in widths]


def usual_dtype(on_gpu: bool) -> str:
    """bfloat16 where the machine multiplies in it, which is up to twice as fast; elsewhere it would be slower."""
    if on_gpu:
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def peak_memory(device: torch.device) -> float:
    """Bytes: the most a GPU has held for us, or the most this process has held in all."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
