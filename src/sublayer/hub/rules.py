"""Weight rules: how a tensor on disk becomes tensors of ours, and back. Each is written once and read both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """A change of form and its inverse: one stored tensor to one or several of ours."""

    load: Callable[[Tensor], Sequence[Tensor]]
    save: Callable[[Sequence[Tensor]], Tensor]
    transposed: bool = False  # a matrix is stored as (in, out)


SAME = Op(lambda stored: (stored,), lambda ours: ours[0])
# GPT-2 keeps its linear layers as (in, out), with query, key and value side by side.
TRANSPOSE = Op(lambda stored: (stored.T,), lambda ours: ours[0].T, transposed=True)
FUSED = Op(lambda stored: stored.chunk(3), lambda ours: torch.cat(list(ours)))
FUSED_TRANSPOSE = Op(lambda stored: stored.T.chunk(3), lambda ours: torch.cat(list(ours)).T, transposed=True)


def leading_ones(count: int) -> Op:
    """Stored with dimensions of size 1 in front."""
    return Op(
        lambda stored: (stored.reshape(stored.shape[count:]),),
        lambda ours: ours[0].reshape((1,) * count + tuple(ours[0].shape)),
    )


@dataclass(frozen=True)
class Rule:
    """`{i}` in the names stands for the number of a layer; `^` before a stored name, for the top of the model.

    Other stored names are inside the body of the model, whose name (`bert.`, `model.`) is the family's prefix.
    """

    stored: str
    ours: tuple[str, ...]
    op: Op = SAME

    def at(self, layer: int) -> Rule:
        ours = tuple(name.replace("{i}", str(layer)) for name in self.ours)
        return Rule(self.stored.replace("{i}", str(layer)), ours, self.op)


def rename(stored: str, ours: str, *parts: str, op: Op = SAME) -> list[Rule]:
    """A rule for each part, `weight` and `bias` unless said otherwise."""
    return [Rule(f"{stored}.{part}", (f"{ours}.{part}",), op) for part in parts or ("weight", "bias")]


def expand(rules: Iterable[Rule], layers: dict[str, int], known: Callable[[str], bool]) -> list[Rule]:
    """One rule for each stored tensor of a model: layers counted out, and rules for absent parts left out.

    `layers` gives the depth of the stacks by the first word of our names; `known` says which names the model has.
    """
    out = []
    for rule in rules:
        repeated = "{i}" in rule.ours[0]
        depth = layers.get(rule.ours[0].split(".")[0], 0) if repeated else 1
        for layer in range(depth):
            counted = rule.at(layer) if repeated else rule
            if known(counted.ours[0]):
                out.append(counted)
    return out
