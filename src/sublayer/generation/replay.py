"""Steps of generation on a GPU, without the time Python takes to ask for each.

A step is a thousand small pieces of work, and asking for them one by one takes several times as long as the GPU does
with them. The second step is therefore recorded as a CUDA graph, and those after it are that graph again: all that
changes from step to step is in tensors. Compiled, a block is a few large pieces of work instead of many small ones.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.block import Block
from ..core.cache import CrossEntry, Entry
from ..core.masks import Mask
from ..data.store import cache_folder
from ..models import Decoder, EncoderDecoder, Model

KEPT = 16  # recordings of one memory
_lock = threading.Lock()
_last: dict[torch.device, Replay] = {}  # keeps the memory that all recordings on a device share


class Replay:
    """One step, recorded. What it gives is written over by the next."""

    def __init__(self, step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        with _lock:
            self._record(step, inputs)

    def _record(self, step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        device = inputs[0].device
        self.inputs = [one.clone() for one in inputs]
        self.graph = torch.cuda.CUDAGraph()
        before = _last.get(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            pool = torch.cuda.graph_pool_handle() if before is None else before.graph.pool()
            self.graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self.output = step(*self.inputs)
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        _last[device] = self

    def __call__(self, *inputs: Tensor) -> Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.output


class Recorder:
    """Runs steps; those of one key, which are of one shape and in one memory, are the same from the second on."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._replays: dict[Hashable, Replay | None] = {}  # None: this step cannot be recorded

    def __call__(self, key: Hashable, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if key not in self._seen or not inputs[0].is_cuda:
            self._seen.add(key)  # live: what is compiled, or loaded on first use, cannot be while recording
            return step(*inputs)
        if key not in self._replays:
            while len(self._replays) >= KEPT:
                self._replays.pop(next(iter(self._replays)))
            try:
                self._replays[key] = Replay(step, inputs)
            except RuntimeError:  # some layer looks at its values; nothing has been computed yet
                self._replays[key] = None
        replay = self._replays[key]
        return step(*inputs) if replay is None else replay(*inputs)


def likeness(model: Model) -> Hashable:
    """The same for two moments between which the model cannot have changed, but for the values of its weights.

    What was recorded in one then holds in the other. None if there is no knowing: with adapters, or with hooks.
    """
    out: list[object] = []
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if not type(module).__module__.startswith(("torch.nn.", "sublayer.core.", "sublayer.models.")) or any(hooks):
            return None
        out += [id(module), type(module), *(id(value) for value in vars(module).values())]
        own = (*module._parameters.values(), *module._buffers.values())
        out += [tensor.data_ptr() for tensor in own if tensor is not None]
    return tuple(out)


@contextmanager
def compiled(model: Model, wanted: bool = True) -> Iterator[None]:
    """Within, single tokens go through compiled blocks, if the model is on a GPU; a CPU has little to gain."""
    if not wanted or model.device.type != "cuda":
        yield
        return
    assert isinstance(model, Decoder | EncoderDecoder)
    # Before the compiler is imported, which else keeps what it makes among temporary files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    model.decoder.one_token = compiled_block
    try:
        yield
    finally:
        model.decoder.one_token = None


def compiled_block(block: Block, x: Tensor, *inputs: Any) -> Tensor:
    """What the block gives for one token a row."""
    mark_lengths(*inputs)
    # Products of a matrix and one vector are then the compiler's own, and only as fast as they should be if tuned.
    return compile_blocks(coordinate_descent_tuning=x.size(0) == 1)(block, x, *inputs)


def mark_lengths(
    valid: Tensor | None,
    mask: Mask,
    rotary: Any,
    entry: Entry,
    memory: Tensor | None,
    memory_mask: Mask | None,
    cross: CrossEntry,
    first: bool,
) -> None:
    """Caches and sources of all lengths are one to the compiler: what it makes for the first serves the others."""
    for tensor in (entry.keys, entry.values, cross.key, cross.value):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for one in (mask, memory_mask):
        for tensor in () if one is None else (one.allowed, one.bias):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, tensor.dim() - 1)


@functools.cache
def compile_blocks(backend: Any = "inductor", **options: Any) -> Callable[..., Tensor]:
    """A block as a function, compiled once for all blocks of one shape."""

    def run(block: Block, *inputs: Any) -> Tensor:
        out: Tensor = block(*inputs)
        return out

    return torch.compile(run, backend=backend, options=options or None)
