"""What the machine can do: the rate of a plain matrix product, the numbers it is fast in, the memory it gave."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

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
