"""The body of a checkpoint under another head: what the two models have in common is kept, the rest is fresh."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from ..config import ModelConfig
from ..core.quantized import bits_of
from ..models import Model, build
from ..models.build import initialize, materialize
from .families import FAMILIES
from .load import OWN_TYPE, architecture, find_family
from .tensors import read_json


def config_with_head(model: Model, head: str, num_labels: int = 2) -> ModelConfig:
    """The model's configuration with another head, as its family has it: with a pooler under it, or without."""
    family = FAMILIES.get((model.origin or {}).get("model_type", ""))
    kinds = [] if family is None else list(family.architectures.values())
    decided: dict[str, Any] = next((dict(kind) for kind in kinds if kind.get("head") == head), {"head": head})
    if family is None and head != "classifier":
        decided["pooler"] = "none"
    return dataclasses.replace(model.config, **decided, num_labels=num_labels)


def rebuilt(model: Model, config: ModelConfig, seed: int = 0) -> tuple[Model, list[str]]:
    """A model under another head on the weights of `model` where they fit, and the names of those that are new.

    A classifier is new in any case: its rows stood for other labels.
    """
    if bits_of(model) is not None:
        raise ValueError(f"the model's weights are in {bits_of(model)} bits; give it another head before they are")
    old = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    kept: set[str] = set()

    def memory(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("head.classifier.") or name not in old or old[name].shape != tensor.shape:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=model.device)
        kept.add(name)
        return old[name].detach()

    new = build(config, "meta", model.dtype)
    materialize(new, memory)
    initialize(new, Generator(model.device).manual_seed(seed), kept)
    new.origin, new.source, new.generation = model.origin, model.source, model.generation
    return new, [name for name, _ in new.named_parameters() if name not in kept]


def under_head_of(model: Model, adapter: Path) -> Model:
    """The model under the head its adapter was trained with, which config.json beside it describes; else as it is."""
    path = adapter.expanduser() / "config.json"
    if not path.exists():
        return model
    theirs = read_json(path)
    if theirs.get("model_type") == OWN_TYPE:
        config = ModelConfig.from_dict(theirs.get("sublayer") or {})
    else:
        family = find_family(theirs, path)
        config = family.read_config(theirs, architecture(theirs, family))
    wanted: dict[str, Any] = {key: getattr(config, key) for key in ("head", "pooler", "num_labels", "logits_bias")}
    config = dataclasses.replace(model.config, **wanted)
    if config != model.config:
        model = rebuilt(model, config)[0].eval()
    model.origin = theirs
    return model
