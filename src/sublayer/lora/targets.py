"""Which layers an adapter goes to: by our names, by those of the checkpoint, or by patterns over either."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ..config import unknown
from ..hub.families import FAMILIES
from ..hub.family import Family
from ..hub.plan import Move
from ..hub.rules import Rule
from ..hub.save import describe
from ..models import Model, build


@dataclass(frozen=True)
class Names:
    """The layers of a model under our names, and under those they have in transformers."""

    layers: tuple[str, ...]  # every layer of ours with weights of its own
    linear: tuple[str, ...]  # the linear ones among them
    modules: dict[str, str]  # such a layer to the module it is, or is a part of, in transformers
    rules: dict[str, Rule]  # a tensor of such a module to those of ours
    stored: dict[str, str]  # a module to its name on disk, which may be another

    @classmethod
    def of(cls, model: Model) -> Names:
        base = build(model.config, device="meta")  # a model without adapters, and without memory
        base.origin = model.origin
        theirs, plan = describe(base, tied=True)
        family = FAMILIES.get(theirs["model_type"])
        places = {ours: [move] for move in plan for ours in move.rule.ours}
        for move in _copies(family, plan):
            places.setdefault(move.rule.ours[0], []).insert(0, move)
        found = {name: part for name, part in base.named_modules() if part._parameters}
        modules, rules, stored = {}, {}, {}
        for name, part in found.items():
            keys = [key for key, value in part._parameters.items() if value is not None]
            disk = _common(keys, [places.get(f"{name}.{key}", []) for key in keys])
            if disk is not None and not part._modules:
                modules[name] = _in_transformers(family, disk)
                stored[modules[name]] = disk
                for key in keys:
                    moves = {move.stored: move for move in places[f"{name}.{key}"]}
                    rules[f"{modules[name]}.{key}"] = moves[f"{disk}.{key}"].rule
        linear = tuple(name for name, part in found.items() if isinstance(part, nn.Linear))
        return cls(tuple(found), linear, modules, rules, stored)

    def labels(self, layer: str) -> list[str]:
        """What a layer may be called."""
        theirs = self.modules.get(layer)
        return [layer, layer.replace(".sublayer.", "."), *([theirs, self.stored[theirs]] if theirs else [])]

    def group(self, layer: str) -> tuple[str, ...]:
        """The layers that are one module in transformers; mostly the layer alone."""
        if layer not in self.modules:
            return (layer,)
        return tuple(name.removesuffix(".weight") for name in self.rules[f"{self.modules[layer]}.weight"].ours)

    def usual(self) -> list[str]:
        """Every projection of attention and feed-forward."""
        return [layer for layer in self.linear if ".blocks." in layer]

    def targets(self, wanted: str | Sequence[str] | None) -> list[str]:
        if wanted is None or wanted == "all-linear":
            return self.usual()
        return self._select("target", wanted, self.linear, _fits)

    def full(self, wanted: str | Sequence[str]) -> list[str]:
        """The layers in these modules, to be trained in full."""
        return self._select("module to train", wanted, self.layers, _within)

    def _select(
        self, what: str, wanted: str | Sequence[str], layers: Sequence[str], fits: Callable[[str, str], bool]
    ) -> list[str]:
        chosen: set[str] = set()
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            hits = {layer for layer in layers if any(fits(pattern, label) for label in self.labels(layer))}
            if not hits:
                known = sorted({label.rpartition(".")[2] for layer in layers for label in self.labels(layer)})
                raise ValueError(unknown(what, pattern, known))
            chosen |= hits
        return [layer for layer in layers if layer in chosen]


def _fits(pattern: str, label: str) -> bool:
    """The end of a name, as PEFT reads a list of targets; or a glob, or a regular expression over the whole of it."""
    if f".{label}".endswith(f".{pattern}") or fnmatch.fnmatchcase(f".{label}", f"*.{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, label) is not None
    except re.error:
        return False


def _within(pattern: str, label: str) -> bool:
    return f".{pattern}." in f".{label}." or _fits(pattern, label)


def _copies(family: Family | None, plan: Sequence[Move]) -> list[Move]:
    """What is one tensor on disk and in transformers several, each in a module of its own."""
    rules = {move.stored: move.rule for move in plan}
    out: list[Move] = []
    if family is None:
        return out
    for names in family.copies:
        copy, original = names if names[1] in rules else (name.removeprefix(family.prefix) for name in names)
        if original in rules:
            side = re.search(r"(encoder|decoder)\.embed_tokens", copy)
            ours = (f"{side[1]}.embeddings.tokens.weight",) if side else rules[original].ours
            out.append(Move(copy, Rule(copy, ours, rules[original].op)))
    return out


def _common(keys: Sequence[str], places: Sequence[Sequence[Move]]) -> str | None:
    """The module on disk that has all the weights of a layer under our names."""
    modules = [
        [move.stored.removesuffix(f".{key}") for move in moves if move.stored.endswith(f".{key}")]
        for key, moves in zip(keys, places, strict=True)
    ]
    return next((name for name in modules[0] if all(name in others for others in modules)), None)


def _in_transformers(family: Family | None, module: str) -> str:
    for stored, name in () if family is None else family.modules:
        module = module.replace(stored, name)
    return module
