"""Weights in the order that oneDNN multiplies them in, for answers made on a CPU.

A step of generation multiplies each weight with a few rows only. torch brings the weight into oneDNN's order anew in
every such product, or lets another library do without; packed once, bfloat16 is more than twice as fast for one row,
and float32 for four. It costs the memory of the weights a second time, and is left undone where that is not free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.heads import Logits
from ..core.layers import Linear
from ..models import Model

SMALLEST = 2**16  # of fewer numbers, a product is over before the order matters


@dataclass
class _Packs:
    users: int = 0
    weights: dict[Linear | Logits, tuple[object, Tensor]] = field(default_factory=dict)


_packs: WeakKeyDictionary[Model, _Packs] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def packed(model: Model, *, keep: bool = True) -> Iterator[None]:
    """Within, the model multiplies by packed weights. They are kept for the next time, unless the weights change."""
    with _lock:
        packs = _packs.setdefault(model, _Packs())
        if not packs.users:
            _renew(model, packs)
        packs.users += 1
    try:
        yield
    finally:
        with _lock:
            packs.users -= 1
            if not packs.users:
                for layer in packs.weights:
                    layer.packed = None
                if not keep:
                    del _packs[model]


def _renew(model: Model, packs: _Packs) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, Linear | Logits) and _packable(layer.weight)]
    fresh = [layer for layer in layers if packs.weights.get(layer, (None,))[0] != _state(layer.weight)]
    for layer in {*packs.weights} - {*layers}:
        del packs.weights[layer]
    if sum(layer.weight.nbytes for layer in fresh if layer not in packs.weights) < free_memory() // 2:
        for layer in fresh:
            weight = layer.weight.detach()
            packs.weights[layer] = _state(layer.weight), torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    for layer, (state, weight) in packs.weights.items():
        layer.packed = weight if state == _state(layer.weight) else None


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < SMALLEST or weight.is_inference():
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and type(weight.data) is Tensor


def _state(weight: Tensor) -> object:
    """Something that changes when the weight does."""
    return weight.data_ptr(), weight._version, weight.shape, weight.dtype


def free_memory() -> int:
    """Bytes that the system could still give, as far as it says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62
