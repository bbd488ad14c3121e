"""A family of checkpoints: how its config.json and its tensors map to ours, as tables that are read both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig, unknown
from .rules import Rule
from .tensors import CheckpointError

Values = dict[str, Any]

# config.json's names of activations; the first that maps to one of ours is the one written.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
}


def _nothing(theirs: Values) -> Values:
    return {}


def _nothing_back(config: ModelConfig) -> Values:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    architectures: dict[str, Values]  # class name to the fields it decides: head, pooler, shape
    fixed: Values  # our fields that are the same for the whole family
    fields: dict[str, str]  # our field to the key of config.json
    rules: Callable[[ModelConfig], list[Rule]]
    defaults: Values = field(default_factory=dict)  # what a key left out of config.json means
    demands: Values = field(default_factory=dict)  # keys whose other values change the mathematics, and are refused
    read: Callable[[Values], Values] = _nothing  # what the tables cannot say: config.json to our fields
    write: Callable[[ModelConfig], Values] = _nothing_back  # and back
    prefix: str = ""  # the name of the body in a model with a head; bare in one without
    always_ties: bool = False  # an absent output matrix is tied whatever config.json says
    copies: tuple[tuple[str, str], ...] = ()  # (name, original): stored twice by some writers
    modules: tuple[tuple[str, str], ...] = ()  # (on disk, in transformers): modules called otherwise than their weights
    ignored: tuple[str, ...] = ()  # regular expressions: stored by some writers and no weights

    def read_config(self, theirs: Values, architecture: str) -> ModelConfig:
        if architecture not in self.architectures:
            known = list(self.architectures)
            raise CheckpointError(unknown(f"architecture for model type {self.model_type!r}", architecture, known))
        for key, wanted in self.demands.items():
            if theirs.get(key, wanted) != wanted:
                raise CheckpointError(
                    f"config.json says {key} is {theirs[key]!r}; only {wanted!r} is supported for {self.model_type!r}"
                )
        values = dict(self.fixed)
        for ours, key in self.fields.items():
            if key in theirs:
                values[ours] = theirs[key]
            elif key in self.defaults:
                values[ours] = self.defaults[key]
            else:
                raise CheckpointError(f"config.json lacks {key!r}, which a {self.model_type!r} model needs")
        if "activation" in values and "activation" in self.fields:
            values["activation"] = read_activation(values["activation"])
        values |= self.read({**self.defaults, **theirs}) | self.architectures[architecture]
        try:
            return ModelConfig.from_dict(values)
        except ValueError as error:
            raise CheckpointError(f"config.json describes no model that can be built: {error}") from None

    def write_config(self, config: ModelConfig) -> Values | None:
        """config.json for this configuration, or None where the family cannot express it."""
        for architecture, decided in self.architectures.items():
            if any(getattr(config, key) != value for key, value in decided.items()):
                continue
            theirs: Values = {"architectures": [architecture], "model_type": self.model_type, **self.demands}
            for ours, key in self.fields.items():
                value = getattr(config, ours)
                theirs[key] = write_activation(value) if ours == "activation" else value
            theirs |= self.write(config)
            try:
                again = self.read_config(theirs, architecture)
            except CheckpointError:
                continue
            if canonical(again) == canonical(config):
                return {key: list(value) if isinstance(value, tuple) else value for key, value in theirs.items()}
        return None


def canonical(config: ModelConfig) -> ModelConfig:
    """The same mathematics said in one way: sizes spelled out, and fields that nothing reads at their defaults."""
    plain = {spec.name: spec.default for spec in dataclasses.fields(ModelConfig)}
    idle = ["init", "init_std", "init_depth_scaled"]
    if config.positions != "rotary":
        idle += ["rotary_base", "rotary_fraction", "rotary_scaling"]
    if config.positions != "relative":
        idle += ["relative_buckets", "relative_max_distance"]
    if config.positions != "learned":
        idle += ["position_offset"]
    if config.positions in ("relative", "alibi", "none") or config.image_input:
        idle += ["max_positions"]
    if config.norm != "layernorm":
        idle += ["norm_bias"]
    if config.head not in ("classifier", "token-classifier"):
        idle += ["num_labels"]
    if config.head not in ("lm", "mlm"):
        idle += ["tie_embeddings", "logits_scale", "logits_bias"]
    if config.shape != "encoder-decoder":
        idle += ["share_embeddings", "start_id"]
    changes: Values = {name: plain[name] for name in idle}
    changes |= {"num_kv_heads": config.kv_heads, "head_dim": config.head_size, "attention_scale": config.scale}
    if config.window_layers is not None and len(config.window_layers) == config.layers(config.shape):
        changes["window_layers"] = None
    return dataclasses.replace(config, **changes)


def read_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(unknown("activation in config.json", name, list(ACTIVATIONS)))
    return ACTIVATIONS[name]


def write_activation(ours: str) -> str | None:
    """The name config.json has for one of ours; None says that it has none, and the family does not fit."""
    return next((theirs for theirs, name in ACTIVATIONS.items() if name == ours), None)


def labels(theirs: Values) -> int:
    """The number of labels: config.json names each, or gives a count."""
    named = theirs.get("id2label")
    if isinstance(named, dict):
        return len(named)
    count = theirs.get("num_labels", 2)
    return count if isinstance(count, int) else 2


def write_labels(config: ModelConfig) -> Values:
    if config.head not in ("classifier", "token-classifier"):
        return {}
    names = {str(n): f"LABEL_{n}" for n in range(config.num_labels)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
