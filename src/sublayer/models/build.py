"""From a configuration to a model: built without memory, given memory, then filled with its family's initial values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Generator, Tensor, nn

from ..config import ModelConfig, unknown
from ..core.attention import Attention
from ..core.embeddings import PatchEmbeddings
from ..core.feedforward import FeedForward
from ..core.heads import Logits
from ..core.norm import BatchNorm, LayerNorm, RMSNorm
from ..core.positions import Learned, RelativeBias, Rotary, Sinusoidal
from ..core.stack import Stack
from .decoder import Decoder
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder
from .model import Model

MODELS: dict[str, type[Model]] = {"encoder": Encoder, "decoder": Decoder, "encoder-decoder": EncoderDecoder}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(unknown("dtype", dtype, tuple(DTYPES)))
    return DTYPES[dtype]


def build(
    config: ModelConfig,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    seed: int | None = None,
) -> Model:
    """A model with fresh weights. `device="meta"` allocates nothing; `seed` makes the weights reproducible."""
    with torch.device("meta"), collector_paused():
        model = MODELS[config.shape](config)
    model.to(dtype=parse_dtype(dtype) or torch.get_default_dtype())
    device = torch.device(device) if device is not None else torch.get_default_device()
    if device.type == "meta":
        return model
    materialize(model, lambda name, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    initialize(model, None if seed is None else Generator(device).manual_seed(seed))
    return model


@contextmanager
def collector_paused() -> Iterator[None]:
    """Thousands of new objects, all of which stay, would set off a search of everything torch imported: 50 ms each."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def materialize(model: nn.Module, memory: Callable[[str, Tensor], Tensor]) -> None:
    """Give every parameter and buffer the memory that `memory(name, tensor)` returns; tied ones stay tied."""
    given: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old tensor alive, so that its id stays its own
    for prefix, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is None:
                    continue
                if id(old) not in given:
                    new = memory(f"{prefix}.{name}" if prefix else name, old)
                    given[id(old)] = (old, nn.Parameter(new, old.requires_grad) if _is_parameter(old) else new)
                store[name] = given[id(old)][1]
    derive(model)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def derive(model: nn.Module) -> None:
    """Fill the tables that follow from the configuration and are stored nowhere."""
    for module in model.modules():
        if isinstance(module, Sinusoidal | Rotary):
            module.derive()


@torch.no_grad()
def initialize(model: Model, generator: Generator | None = None, kept: Set[str] = frozenset()) -> None:
    """Fresh weights, by the scheme of the configuration, but for those named in `kept`, which have theirs.

    DeepNorm brings its own scheme: Xavier with the gain β.
    """
    config = model.config
    scheme = "xavier" if config.placement == "deep" else config.init
    filled = {id(tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers()) if name in kept}

    def fill(weight: Tensor, gain: float = 1.0, shrink: float = 1.0) -> None:
        if id(weight) in filled:
            return
        if scheme == "xavier":
            nn.init.xavier_uniform_(weight.flatten(1), gain=gain, generator=generator)
        elif scheme == "fan-in":
            nn.init.normal_(weight, 0.0, shrink * weight[0].numel() ** -0.5, generator=generator)
        else:
            spread(weight, shrink * config.init_std)

    def spread(weight: Tensor, std: float) -> None:
        if id(weight) in filled:
            return
        if scheme == "truncated":
            nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)
        else:
            nn.init.normal_(weight, 0.0, std, generator=generator)

    table_std = {"xavier": config.d_model**-0.5, "fan-in": 1.0}.get(scheme, config.init_std)
    # Without 1/√head_dim in the scores, the initial queries carry it (T5).
    query_shrink = config.head_size**-0.5 / config.scale if scheme == "fan-in" else 1.0
    done: set[int] = set()

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias" and id(parameter) not in filled:
                nn.init.zeros_(parameter)
        if isinstance(module, LayerNorm | RMSNorm | BatchNorm) and id(module.weight) not in filled:
            nn.init.ones_(module.weight)
            if isinstance(module, BatchNorm):
                nn.init.zeros_(module.running_mean)
                nn.init.ones_(module.running_var)
        if isinstance(module, Logits) and module.bias is not None and id(module.bias) not in filled:
            nn.init.zeros_(module.bias)
        if isinstance(module, Stack):
            _fill_blocks(module, config, fill, query_shrink)
            done.update(id(part) for block in module.blocks for part in block.modules())
        elif isinstance(module, nn.Embedding | Learned | Logits) and id(module.weight) not in done:
            spread(module.weight, table_std)
            done.add(id(module.weight))
        elif isinstance(module, RelativeBias):
            spread(module.weight, config.d_model**-0.5)
        elif isinstance(module, nn.Linear | nn.Conv2d) and id(module) not in done:
            fill(module.weight)
        if isinstance(module, PatchEmbeddings):
            spread(module.class_token, table_std)


def _fill_blocks(stack: Stack, config: ModelConfig, fill: Callable[..., None], query_shrink: float) -> None:
    beta = config.deepnorm("decoder" if stack.causal else "encoder")[1]
    branches = sum(isinstance(part, Attention | FeedForward) for part in stack.blocks.modules())
    shrink = branches**-0.5 if config.init_depth_scaled else 1.0
    for part in stack.blocks.modules():
        if isinstance(part, Attention):
            fill(part.query.weight, shrink=query_shrink)
            fill(part.key.weight)
            fill(part.value.weight, gain=beta)
            fill(part.output.weight, gain=beta, shrink=shrink)
        elif isinstance(part, FeedForward):
            fill(part.up.weight, gain=beta)
            if part.gate is not None:
                fill(part.gate.weight, gain=beta)
            fill(part.down.weight, gain=beta, shrink=shrink)
