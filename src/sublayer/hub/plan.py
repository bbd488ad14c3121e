"""Which stored tensor goes where: a family's rules laid over one model, checked in full before anything is read."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..models import Model, build
from .family import Family
from .rules import Rule, expand
from .tensors import CheckpointError, StoredTensor


@dataclass(frozen=True)
class Move:
    """One stored tensor and the names of ours it fills; nothing stored means zeros."""

    stored: str
    rule: Rule


def moves(family: Family, model: Model, bare: bool, *, tied: bool = False) -> list[Move]:
    """Every tensor of a model under the name it has on disk; `bare` leaves out the name of the body.

    With `tied`, a tied output matrix is among them under the name it would have.
    """
    config = model.config
    names = set(model.state_dict())
    if config.tie_embeddings and not tied:
        names.discard("head.logits.weight")  # it is the token matrix
    layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    rules = expand(family.rules(config), layers, names.__contains__)
    return [Move(_on_disk(family, rule, bare), rule) for rule in rules]


def _on_disk(family: Family, rule: Rule, bare: bool) -> str:
    """A rule's name is that inside the body of the model, unless `^` says that it stands outside."""
    if rule.stored.startswith("^"):
        return rule.stored[1:]
    return rule.stored if bare else family.prefix + rule.stored


def covered(model: Model, plan: list[Move]) -> None:
    """Every weight of the model has a rule: a gap is a mistake in our tables, not in somebody's file."""
    state = model.state_dict(keep_vars=True)
    filled = {id(state[name]) for move in plan for name in move.rule.ours}
    gaps = [name for name, tensor in state.items() if id(tensor) not in filled]
    assert not gaps, f"no weight rule for {gaps}"


def fit(
    family: Family, config: ModelConfig, stored: dict[str, StoredTensor], folder: Path
) -> tuple[Model, list[Move], dict[str, StoredTensor]]:
    """The model a folder holds, without memory yet, and what fills it."""
    tensors = {_modern(name): tensor for name, tensor in stored.items()}
    bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in tensors)
    names = {rule.ours[0]: _on_disk(family, rule, bare) for rule in family.rules(config)}
    _drop_copies(family, tensors, bare, set(names.values()))
    config = _as_stored(family, config, tensors, names)
    depth = config.num_encoder_layers + config.num_decoder_layers
    if depth > len(stored):
        raise CheckpointError(
            f"{folder}: config.json speaks of {depth} layers, and the files hold {len(stored)} tensors"
        )
    model = build(config, device="meta")
    plan = moves(family, model, bare)
    covered(model, plan)
    _check(family, model, plan, tensors, folder)
    return model, plan, tensors


def _modern(name: str) -> str:
    """BERT's first files call the weights of a norm gamma and beta."""
    return re.sub(
        r"LayerNorm\.(gamma|beta)$", lambda old: "LayerNorm." + {"gamma": "weight", "beta": "bias"}[old[1]], name
    )


def _drop_copies(family: Family, tensors: dict[str, StoredTensor], bare: bool, claimed: set[str]) -> None:
    """Some writers store a shared tensor under each of its names."""
    for names in family.copies:
        copy, original = (name.removeprefix(family.prefix) if bare else name for name in names)
        if copy not in tensors or copy in claimed:
            continue
        if original not in tensors:
            tensors[original] = tensors.pop(copy)
        elif tensors[copy].same_as(tensors[original]):
            del tensors[copy]


def _as_stored(
    family: Family, config: ModelConfig, tensors: dict[str, StoredTensor], names: dict[str, str]
) -> ModelConfig:
    """What only the files can say: whether the output matrix is tied, and whether there is a pooler."""
    changes: dict[str, Any] = {}
    if config.head in ("lm", "mlm"):
        sides = (names.get(f"{side}.embeddings.tokens.weight") for side in ("decoder", "encoder"))
        tokens = next((tensors[name] for name in sides if name in tensors), None)
        output = tensors.get(names.get("head.logits.weight", ""))
        if output is None and family.always_ties:
            changes["tie_embeddings"] = True
        elif output is not None and tokens is not None and config.tie_embeddings:
            if output.same_as(tokens):
                del tensors[names["head.logits.weight"]]
            else:  # config.json says tied, and two different matrices came with it
                changes["tie_embeddings"] = False
    if config.pooler != "none" and config.head == "none" and not any("pooler" in name for name in tensors):
        changes["pooler"] = "none"
    return dataclasses.replace(config, **changes)


def _check(family: Family, model: Model, plan: list[Move], tensors: dict[str, StoredTensor], folder: Path) -> None:
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = [move.stored for move in plan if move.stored not in tensors and not _may_be_absent(move.stored)]
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing, 'missing')}; the checkpoint is incomplete")
    for move in plan:
        if move.stored not in tensors:
            continue
        ours: list[Tensor] = [torch.empty(shapes[name], device="meta") for name in move.rule.ours]
        expected, found = tuple(move.rule.op.save(ours).shape), tensors[move.stored]
        if found.shape != expected:
            raise CheckpointError(
                f"{found.file}: tensor {move.stored!r} has shape {found.shape}; config.json asks for {expected}"
            )
        if not found.dtype.is_floating_point:
            raise CheckpointError(f"{found.file}: tensor {move.stored!r} is {found.dtype}; expected floating point")
    claimed = {move.stored for move in plan}
    ignored = re.compile("|".join((*family.ignored, r"(.*\.)?pooler\..*")))
    extra = [name for name in tensors if name not in claimed and not ignored.fullmatch(name)]
    if extra:
        raise CheckpointError(
            f"{folder}: {_some(extra, 'not part of this architecture')}; is config.json the right one?"
        )


def _may_be_absent(name: str) -> bool:
    return name == "final_logits_bias"


def _some(names: list[str], what: str) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'} {what}"
