"""An adapter inside a layer. The layer keeps its class, its weights and their names; the adapter is added beneath.

decoder.blocks.0.attention.sublayer.query.weight            the base, frozen
decoder.blocks.0.attention.sublayer.query.lora.NAME.a       an adapter's two matrices
head.classifier.lora.NAME.weight                            an adapter's own copy of a layer trained in full
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.layers import Dropout, product_type
from .joined import can_join, joined


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an adapter was made with."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    trainable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; it must be a whole number of at least 1")
        if not isinstance(self.alpha, int | float) or not self.alpha > 0 or math.isinf(self.alpha):
            raise ValueError(f"alpha is {self.alpha!r}; it must be a number above 0")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; it must be at least 0 and less than 1")


@dataclass
class State:
    """What all adapted layers of a model have in common: which adapter answers."""

    settings: dict[str, Settings] = field(default_factory=dict)
    active: str | None = None
    rows: Rows | None = None
    trained: frozenset[str] = frozenset()  # what learned before the first adapter froze the base
    merged: Any = None  # how to undo a merge


class Adapter(nn.Module):
    """Beside W: scale · B·A (Hu et al. 2021); with a magnitude, that is how long the rows of the sum are (DoRA)."""

    def __init__(
        self,
        a: nn.Parameter,  # (r, in)
        b: nn.Parameter,  # (out, r)
        magnitude: nn.Parameter | None = None,  # (out,)
        *,
        alpha: float,
        rslora: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.a, self.b, self.magnitude = a, b, magnitude
        self.alpha = alpha
        self.scale = alpha / (math.sqrt(self.rank) if rslora else self.rank)
        self.dropout = Dropout(dropout)

    @property
    def rank(self) -> int:
        return self.a.size(0)

    def extra(self, layer: nn.Linear, x: Tensor, out: Tensor) -> Tensor:
        """What is added to the layer's answer `out`."""
        if product_type(x) is None:  # autocast would only undo it
            x = x.to(self.a.dtype)
        x = self.dropout(x)
        low = F.linear(F.linear(x, self.a) * self.scale, self.b)
        if self.magnitude is None:
            return low
        weight = layer.weight.to(self.a.dtype)
        length = self.magnitude / self.length(weight).to(self.a.dtype)
        if self.dropout.p and self.training:
            base = F.linear(x, weight)
        else:
            base = out if layer.bias is None else out - layer.bias
        return (length - 1) * base + length * low

    def length(self, weight: Tensor) -> Tensor:
        """Of each row of W + scale · B·A. A constant to the gradient, as section 4.3 of the paper proposes."""
        with torch.no_grad():
            return torch.linalg.norm(weight + self.scale * (self.b @ self.a), dim=1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The matrix that does by itself what layer and adapter do together."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        out = wide + self.scale * (self.b @ self.a).to(wide.dtype)
        if self.magnitude is not None:
            out *= (self.magnitude / torch.linalg.norm(out, dim=1))[:, None]
        return out.to(weight.dtype)


def twin(layer: nn.Module) -> nn.Module:
    """A layer of the same kind with weights of its own, to be trained in full in the layer's place."""
    new = copy.copy(layer)
    if isinstance(layer, Adapted):
        new.__class__ = layer.plain
        del new.__dict__["state"]
    new.__dict__.pop("packed", None)  # another form of the weights
    new._modules = {}
    own = layer._parameters.items()
    new._parameters = {key: None if value is None else nn.Parameter(value.detach().clone()) for key, value in own}
    new._buffers = {key: None if value is None else value.clone() for key, value in layer._buffers.items()}
    return new


class Rows:
    """Which adapter answers in which row of a batch; None is the base alone."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = list(names)
        self._index: dict[tuple[int, torch.device], list[tuple[str, Tensor]]] = {}

    def groups(self, batch: int, device: torch.device) -> list[tuple[str, Tensor]]:
        """The rows of each adapter. A batch may be a multiple: the beams of a row stand side by side."""
        key = (batch, device)
        if key not in self._index:
            each, rest = divmod(batch, len(self.names))
            if rest:
                raise ValueError(f"a batch of {batch} rows came, and adapters were named for {len(self.names)}")
            found: dict[str, list[int]] = {}
            for row in range(batch):
                name = self.names[row // each]
                if name is not None:
                    found.setdefault(name, []).append(row)
            self._index[key] = [(name, torch.tensor(index, device=device)) for name, index in found.items()]
        return self._index[key]


class Adapted(nn.Module):
    """Mixed into the class of a layer that has adapters."""

    plain: type[nn.Module]
    lora: nn.ModuleDict
    state: State

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        if self.state.rows is not None:
            return self._by_row(self.state.rows, x, more)
        entry = self._entry()
        if entry is not None and not isinstance(entry, Adapter):
            return entry.forward(x, *more)
        if entry is not None and self._joins(entry, x):
            return joined(x, self.weight, self.bias, entry.a, entry.b, entry.scale)  # type: ignore[arg-type]
        out: Tensor = super().forward(x, *more)
        return out if entry is None else self._with(entry, x, out)

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Of a layer of logits: what it multiplies by."""
        return (self._entry() or super()).matrix()  # type: ignore[operator, union-attr]

    def _entry(self) -> nn.Module | None:
        """What the adapter in use has here."""
        return self.lora._modules.get(self.state.active)  # type: ignore[arg-type]

    def _joins(self, adapter: Adapter, x: Tensor) -> bool:
        plain = adapter.magnitude is None and not (adapter.dropout.p and adapter.training)
        weight = self._parameters.get("weight")
        return plain and weight is not None and can_join(x, weight, adapter.a)

    def _with(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor:
        assert isinstance(self, nn.Linear)
        return (out + adapter.extra(self, x, out)).to(out.dtype)

    def _by_row(self, rows: Rows, x: Tensor, more: tuple[Any, ...]) -> Tensor:
        out: Tensor = super().forward(x, *more)
        for name, index in rows.groups(x.size(0), x.device):
            if name in self.lora:
                part, entry = x[index], self.lora[name]
                if isinstance(entry, Adapter):
                    answer = self._with(entry, part, out[index])
                else:
                    answer = entry.forward(part, *(m[index] if isinstance(m, Tensor) else m for m in more))
                out = out.index_copy(0, index, answer)
        return out


@functools.cache
def _with_adapters(kind: Any) -> Any:
    return type(f"Adapted{kind.__name__}", (Adapted, kind), {"plain": kind})


def open_layer(layer: nn.Module, state: State) -> Adapted:
    """Let a layer take adapters. What it is, and all it holds, stays."""
    if not isinstance(layer, Adapted):
        layer.lora = nn.ModuleDict()
        layer.state = state  # type: ignore[assignment]
        kind: Any = type(layer)
        layer.__class__ = _with_adapters(kind)
    assert isinstance(layer, Adapted)
    return layer


def close_layer(layer: Adapted) -> nn.ModuleDict:
    """The layer as it was before; its adapters are handed back."""
    lora = layer.lora
    object.__setattr__(layer, "__class__", layer.plain)
    del layer._modules["lora"], layer.__dict__["state"]
    return lora
