"""Adapters of a model: made, switched, merged into it and taken out again."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig, unknown
from ..core.quantized import Quantized, bits_of
from ..models import Model
from .layer import Adapted, Adapter, Rows, Settings, State, close_layer, open_layer, twin
from .targets import Names


@dataclass(frozen=True)
class Summary:
    """What learns, of how many parameters in all."""

    trainable: int
    total: int

    @property
    def share(self) -> float:
        return self.trainable / self.total

    def __str__(self) -> str:
        return f"{self.trainable:,} of {self.total:,} parameters learn ({self.share:.2%})"


@dataclass(frozen=True)
class Merged:
    """What a merge put aside."""

    name: str
    config: ModelConfig
    lora: dict[str, nn.ModuleDict]
    weights: dict[tuple[str, str], nn.Parameter]


def add(
    model: Model,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] | None = None,
    dropout: float = 0.0,
    *,
    name: str = "default",
    rslora: bool = False,
    dora: bool = False,
    train_also: str | Sequence[str] = (),
) -> None:
    """Freeze the model and put a new adapter around its linear layers. It changes no answer before it is trained.

    `targets` are names or patterns, ours or those of the checkpoint; None takes every projection of attention and
    feed-forward. `train_also` names modules trained in full, in a copy of the adapter's own. Where a checkpoint keeps
    several of our layers in one matrix, they share A, as they do in PEFT.
    """
    settings = Settings(rank=rank, alpha=alpha, dropout=dropout, rslora=rslora, dora=dora)
    check_name(model, name)
    names = Names.of(model)
    full = names.full(train_also) if train_also else []
    for path in full:
        if path not in names.modules:
            raise ValueError(f"{path} is no module of its own in transformers, so it cannot be trained in full")
    entries: dict[str, nn.Module] = {}
    shared: dict[tuple[str, ...], nn.Parameter] = {}
    for path in names.targets(targets):
        if path not in full:
            layer, group = linear(model, path), names.group(path)
            if group not in shared:
                shared[group] = nn.Parameter(_zeros(layer, rank, layer.in_features))
                nn.init.kaiming_uniform_(shared[group], a=math.sqrt(5))
            entries[path] = make_adapter(
                layer, shared[group], nn.Parameter(_zeros(layer, layer.out_features, rank)), settings
            )
    attach(model, name, settings, entries | make_copies(model, full, tied=True))


def linear(model: Model, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _zeros(layer: nn.Linear, rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=adapter_dtype(layer), device=layer.weight.device)


def adapter_dtype(layer: nn.Linear) -> torch.dtype:
    """float32 even beside a layer of less, since small steps would be lost in that."""
    return torch.float64 if layer.weight.dtype == torch.float64 else torch.float32


def make_adapter(
    layer: nn.Linear,
    a: nn.Parameter,
    b: nn.Parameter,
    settings: Settings,
    *,
    alpha: float | None = None,
    magnitude: nn.Parameter | None = None,
) -> Adapter:
    if settings.dora and magnitude is None:
        magnitude = nn.Parameter(lengths(layer, a.dtype))
    alpha = settings.alpha if alpha is None else alpha
    return Adapter(a, b, magnitude, alpha=alpha, rslora=settings.rslora, dropout=settings.dropout)


def lengths(layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Of each row of the base's matrix: the magnitude with which DoRA starts."""
    return torch.linalg.norm(layer.weight.detach().to(dtype), dim=1)


def make_copies(model: Model, layers: Sequence[str], *, tied: bool) -> dict[str, nn.Module]:
    """Copies of the weights of these layers. If `tied`, those that share a matrix with them come along, and share."""
    for path in layers:
        if isinstance(model.get_submodule(path), Quantized):
            raise ValueError(f"{path} is in {bits_of(model)} bits and cannot be trained in full; let quantize skip it")
    own = {
        path: {key: value for key, value in part._parameters.items() if value is not None}
        for path, part in model.named_modules()
    }
    matrices = {id(value) for path in layers for value in own[path].values()}
    if tied:
        layers = [path for path in own if any(id(value) in matrices for value in own[path].values())]
    copied: dict[int, nn.Parameter] = {}
    copies = {path: twin(model.get_submodule(path)) for path in layers}
    for path, new in copies.items() if tied else ():
        for key, value in own[path].items():
            new.register_parameter(key, copied.setdefault(id(value), new.get_parameter(key)))
    return copies


def attach(model: Model, name: str, settings: Settings, entries: Mapping[str, nn.Module]) -> None:
    """Put the parts of a new adapter into their layers, and let it answer."""
    state = getattr(model, "adapters", None)
    if state is None:
        own = model.named_parameters(remove_duplicate=False)
        state = State(trained=frozenset(path for path, parameter in own if parameter.requires_grad))
        model.requires_grad_(False)
        vars(model)["adapters"] = state
    for path, entry in entries.items():
        layer = open_layer(model.get_submodule(path), state)
        layer.lora[name] = entry.train(layer.training)
    state.settings[name] = settings
    use(model, name)


def check_name(model: Model, name: str) -> None:
    if not re.fullmatch(r"[\w-]+", name) or hasattr(nn.ModuleDict, name):
        raise ValueError(f"{name!r} cannot name an adapter; use letters, digits, - and _")
    state = getattr(model, "adapters", None)
    if state is not None and state.merged is not None:
        raise ValueError(f"adapter {state.merged.name!r} is merged into the model; unmerge it first")
    if name in names(model):
        raise ValueError(f"the model has an adapter {name!r} already; remove it first, or give another name")


def state_of(model: Model, name: str | None = None) -> State:
    """What the model knows of its adapters, once `name` is known to be one."""
    state = getattr(model, "adapters", None)
    if not isinstance(state, State):
        raise ValueError("the model has no adapter; make one (sublayer.lora.add), or load one (sublayer.lora.load)")
    if state.merged is not None:
        raise ValueError(f"adapter {state.merged.name!r} is merged into the model; unmerge it first")
    if name is not None and name not in state.settings:
        raise ValueError(unknown("adapter", name, list(state.settings)))
    return state


def only(model: Model, name: str | None) -> str:
    """The adapter that is meant where none is named."""
    state = state_of(model, name)
    name = name or state.active
    if name is None and len(state.settings) > 1:
        raise ValueError(f"which adapter? The model has {', '.join(state.settings)}, and none of them is in use")
    return name or next(iter(state.settings))


def parts(model: Model) -> dict[str, Adapted]:
    """The layers that have adapters."""
    return {path: part for path, part in model.named_modules() if isinstance(part, Adapted)}


def names(model: Model) -> list[str]:
    state = getattr(model, "adapters", None)
    return list(state.settings) if isinstance(state, State) else []


def use(model: Model, name: str | None) -> None:
    """Let this adapter answer, and learn if it may; None: the base alone."""
    state = state_of(model, name)
    state.active = name
    for layer in parts(model).values():
        for key, entry in layer.lora.items():
            entry.requires_grad_(key == name and state.settings[key].trainable)


@contextmanager
def rows(model: Model, adapters: Sequence[str | None]) -> Iterator[None]:
    """While it lasts, each row of a batch is answered by an adapter of its own, or by the base where it is None.

    The base is computed once for all rows. Batches are padded, (B, T); with beams, those of a row stand side by side.
    """
    state = state_of(model)
    for name in adapters:
        state_of(model, name)
    before, state.active, state.rows = state.active, None, Rows(adapters)
    try:
        yield
    finally:
        state.active, state.rows = before, None


def remove(model: Model, name: str) -> None:
    """Forget an adapter. With the last one, the model is again what it was before the first."""
    state = state_of(model, name)
    for layer in parts(model).values():
        if name in layer.lora:
            del layer.lora[name]
        if not layer.lora:
            close_layer(layer)
    del state.settings[name]
    if state.active == name:
        state.active = None
    if not state.settings:
        _thaw(model, state)


def merge(model: Model, name: str | None = None, *, keep: bool = True) -> None:
    """Compute an adapter into the weights: a plain model, as fast as the base, which `save_model` writes.

    `unmerge` gives the base back bit for bit. For that the weights that change are kept too, in the CPU's memory; with
    `keep=False` they and all adapters are let go.
    """
    name = only(model, name)
    if bits_of(model) is not None:
        raise ValueError(
            f"the model's weights are in {bits_of(model)} bits, which cannot hold the sum; save the adapter, and merge "
            "it into the original (sublayer convert MODEL OUT --merge ADAPTER)"
        )
    state = state_of(model)
    merged = Merged(name, model.config, {}, {})
    new: dict[int, nn.Parameter] = {}  # what was tied stays tied
    state.active = None
    for path, layer in parts(model).items():
        merged.lora[path] = close_layer(layer)
        entry = merged.lora[path]._modules.get(name)
        if isinstance(entry, Adapter):
            weight = layer.get_parameter("weight")
            layer.weight = nn.Parameter(entry.merged(weight), requires_grad=False)
            if keep:
                merged.weights[path, "weight"] = weight
                weight.data = weight.data.to("cpu")
        elif entry is not None:
            for key, value in entry.named_parameters():
                merged.weights[path, key] = layer.get_parameter(key)
                fresh = nn.Parameter(value.detach().clone(), requires_grad=False)
                layer.register_parameter(key, new.setdefault(id(value), fresh))
    model.config = _as_tied(model)
    state.merged = merged
    if not keep:
        _thaw(model, state)


def unmerge(model: Model) -> None:
    """Take the merged adapter out again: the weights are those from before, bit for bit, and it is in use."""
    state = getattr(model, "adapters", None)
    if state is None or state.merged is None:
        raise ValueError("no adapter is merged into the model")
    merged, state.merged = state.merged, None
    for (path, key), parameter in merged.weights.items():
        layer = model.get_submodule(path)
        parameter.data = parameter.data.to(getattr(layer, key).device)
        setattr(layer, key, parameter)
    for path, lora in merged.lora.items():
        layer = open_layer(model.get_submodule(path), state)
        layer.lora = lora.to(model.device)
    model.config = merged.config
    use(model, merged.name)


def _thaw(model: Model, state: State) -> None:
    """The model has no adapters any more: what learned before the first learns again."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name in state.trained)
    del model.adapters


def _as_tied(model: Model) -> ModelConfig:
    """The configuration of the model as it is now: a copy of one of two tied matrices may have parted them."""
    config = model.config
    weights = dict(model.named_parameters(remove_duplicate=False))
    sides = [weights.get(f"{side}.embeddings.tokens.weight") for side in ("encoder", "decoder")]
    output = weights.get("head.logits.weight")
    tokens = sides[0] if sides[1] is None else sides[1]
    changes: dict[str, Any] = {}
    if config.tie_embeddings and output is not None and output is not tokens:
        changes["tie_embeddings"] = False
    if config.share_embeddings and None not in sides and sides[0] is not sides[1]:
        changes["share_embeddings"] = False
    return dataclasses.replace(config, **changes)


def summary(model: Model) -> Summary:
    return Summary(sum(p.numel() for p in model.parameters() if p.requires_grad), model.num_parameters())
