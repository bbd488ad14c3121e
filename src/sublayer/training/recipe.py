"""A recipe: one commented TOML file that tells a whole training run, and the key=value pairs that change it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ModelConfig, unknown
from ..data.settings import DataSettings, TokenizerSettings
from .optimizer import OPTIMIZERS
from .schedule import SCHEDULES

DTYPES = ("float32", "bfloat16")
PARALLEL = ("auto", "ddp", "fsdp")
BUILT_IN = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    steps: int = 1000
    epochs: float | None = None  # how often all the data is seen; decides the steps, where it is given
    batch_tokens: int = 4096  # of a whole step, over all processes; a pair counts with its longer side
    micro_tokens: int | None = None  # the most that goes through the model at once; None: a step's share of a process
    seed: int = 0
    device: str | None = None  # None: the GPU if there is one

    optimizer: str = "adamw"
    lr: float | None = 1e-3  # the peak; with inverse-sqrt, 0 asks for the paper's own scale
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    momentum: float = 0.95  # muon
    clip: float = 1.0  # of the gradient's norm; 0: never
    schedule: str = "cosine"
    warmup: int | float = 100  # below 1: a share of all steps
    final_lr: float = 0.0  # as a fraction of the peak
    decay: int | None = None  # wsd: how many steps the decay takes
    label_smoothing: float = 0.0
    class_weights: str | tuple[float, ...] | None = None  # "balanced", or one for each label in the model's order
    freeze: tuple[str, ...] = ()  # patterns of the parameters that stay as they are: "embeddings.*"
    layer_decay: float = 1.0  # each layer learns this much slower than the one above it
    lr_factors: dict[str, float] | None = None  # pattern of parameters -> what their learning rate is multiplied by

    dtype: str = "float32"  # of the arithmetic; the weights themselves stay in float32
    compile: bool = False
    recompute: bool = False  # activations of a block are computed again in the backward pass, not kept
    loss_chunk: int | None = None  # rows of logits held at once
    keep_memory: bool = True  # Linux: freed memory stays with the process, which makes CPU training faster
    parallel: str = "auto"  # with torchrun: ddp, or fsdp, which also shards weights and optimiser

    ema: float = 0.0  # decay of a running average of the weights, which is then what is evaluated and saved
    average: int = 0  # the model at the end is the mean of this many last checkpoints
    log_every: int = 10
    save_every: int | None = 500
    keep: int = 2  # checkpoints on disk
    eval_every: int | None = 200  # 0: once an epoch
    eval_first: bool = False  # before the first step too
    eval_tokens: int | None = 50_000  # of the validation data that an evaluation reads, from its start; None: all
    eval_samples: int = 64  # texts generated for BLEU, chrF and exact match, and shown in the report
    metric: str = "valid_loss"  # decides the best model and early stopping
    best: str | None = None  # the metric by which the best model is kept and is what the run ends with
    patience: int = 0  # evaluations without a better metric before the run stops; 0: never stops early
    nonfinite: str = "skip"  # a step whose gradient is not finite is skipped, or stops the run
    spike: float = 0.0  # a gradient this many times its running mean is treated the same way; 0: off
    max_skips: int = 10  # in a row, before the run stops all the same
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("dtype", DTYPES), ("parallel", PARALLEL),
            ("nonfinite", ("skip", "stop")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(unknown(f"train.{name}", getattr(self, name), known))
        least = dict(steps=1, batch_tokens=1, micro_tokens=1, warmup=0, decay=1, log_every=1, save_every=1, keep=1)
        least |= dict(
            eval_every=0, eval_samples=0, eval_tokens=1, patience=0, max_skips=1, loss_chunk=1, average=0, seed=0
        )
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"train.{name} is {value}; it must be at least {bound}")
        for name in ("lr", "eps", "weight_decay", "clip", "spike", "final_lr", "label_smoothing", "ema", "momentum"):
            if (getattr(self, name) or 0.0) < 0.0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must not be negative")
        if self.epochs is not None and self.epochs <= 0.0:
            raise ValueError(f"train.epochs is {self.epochs}; it must be above 0")
        if not 0.0 < self.layer_decay <= 1.0:
            raise ValueError(f"train.layer_decay is {self.layer_decay}; it must be above 0 and at most 1")
        if any(factor < 0.0 for factor in (self.lr_factors or {}).values()):
            raise ValueError(f"train.lr_factors is {self.lr_factors}; no factor may be negative")
        if isinstance(self.class_weights, str) and self.class_weights != "balanced":
            raise ValueError(f"train.class_weights is {self.class_weights!r}; expected 'balanced' or a list of numbers")
        if isinstance(self.class_weights, tuple) and min(self.class_weights, default=0.0) <= 0.0:
            raise ValueError(f"train.class_weights is {list(self.class_weights)}; every weight must be above 0")
        for name in ("ema", "label_smoothing", "momentum"):
            if getattr(self, name) >= 1.0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be below 1")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"train.betas is {list(self.betas)}; expected two numbers from 0 to below 1")
        if self.parallel == "fsdp" and self.optimizer == "adafactor":
            raise ValueError("train.optimizer 'adafactor' cannot be sharded; use adamw or muon, or train.parallel=ddp")
        if self.average > self.keep:
            raise ValueError(
                f"train.average is {self.average} and train.keep {self.keep}; "
                "an average needs that many checkpoints kept: raise train.keep"
            )

    @property
    def warmup_steps(self) -> int:
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * self.steps)

    @property
    def judge(self) -> str:
        """The metric that decides what is best; "accuracy" says valid_accuracy."""
        short = ("loss", "perplexity", "accuracy")
        return f"valid_{self.best}" if self.best in short else self.best or self.metric

    @property
    def keeps_best(self) -> bool:
        return self.best is not None or self.patience > 0


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """An adapter beside the frozen weights; the words are those of `sublayer.lora.add`."""

    rank: int = 8
    alpha: float | None = None  # None: twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None  # None: every projection of attention and feed-forward networks
    rslora: bool = False
    dora: bool = False
    train_also: tuple[str, ...] = ()  # modules trained whole beside it; a new head is among them by itself
    bits: int | None = None  # 4 or 8: the frozen projections are held in as many (QLoRA)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1; to train all weights, use --full")
        if self.alpha is not None and self.alpha <= 0.0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout is {self.dropout}; it must be from 0 to below 1")
        if self.bits not in (None, 4, 8):
            raise ValueError(f"lora.bits is {self.bits}; weights can be held in 4 bits or in 8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    # "preset", or "path" of a model to go on from, and fields of ModelConfig that differ from it.
    model: dict[str, Any] = field(default_factory=dict)
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings | None = None

    def to_toml(self) -> str:
        """The recipe as it was resolved: every key with its value. TOML has no word for None: we write "none"."""
        parts = []
        for section in SECTIONS:
            values = getattr(self, section)
            if values is None:
                continue
            values = values if isinstance(values, dict) else dataclasses.asdict(values)
            lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
            parts.append("\n".join([f"[{section}]", *lines]))
        return "\n\n".join(parts) + "\n"


SECTIONS: dict[str, type] = {
    "model": dict, "lora": LoraSettings, "data": DataSettings, "tokenizer": TokenizerSettings, "train": TrainSettings,
}  # fmt: skip


def find_recipe(name: str) -> Path:
    """A file as it is given, or a recipe that came with the package, by its name."""
    path = Path(name)
    if path.is_file():
        return path
    known = sorted(file.stem for file in BUILT_IN.glob("*.toml"))
    if path.stem in known and path.parent in (Path(), Path("recipes")):
        return BUILT_IN / f"{path.stem}.toml"
    hint = unknown("recipe", path.stem, known)
    raise ValueError(f"{name} is no file; {hint}")


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe file, with key=value pairs such as `train.steps=1000` put over it."""
    return make_recipe(change(read_values(path), changes, str(path)), str(path))


def read_values(path: Path) -> dict[str, Any]:
    """The sections of a recipe file, as they stand there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def change(values: dict[str, Any], changes: Sequence[str], where: str) -> dict[str, Any]:
    """The sections of a recipe with key=value pairs put over them."""
    for pair in changes:
        key, equals, text = pair.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise ValueError(f"{pair!r} is no setting; expected section.key=value, such as train.steps=1000")
        if not isinstance(values.setdefault(section, {}), dict):
            raise ValueError(f"{where}: {section} must be a section, [{section}]")
        values[section][name] = _value(text)
    return values


def make_recipe(values: dict[str, Any], where: str) -> Recipe:
    made: dict[str, Any] = {}
    for section, content in values.items():
        if section not in SECTIONS:
            raise ValueError(f"{where}: {unknown('section', section, list(SECTIONS))}")
        if not isinstance(content, dict):
            raise ValueError(f"{where}: {section} must be a section, [{section}]")
        if section == "model":
            known = ["preset", "path", *(spec.name for spec in dataclasses.fields(ModelConfig))]
            for key in content:
                if key not in known:
                    raise ValueError(f"{where}: {unknown('key of [model]', key, known)}")
            made[section] = content
        else:
            made[section] = _settings(SECTIONS[section], section, content, where)
    return Recipe(**made)


def _settings(cls: type, section: str, values: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"{where}: {unknown(f'key of [{section}]', key, list(hints))}")
        values = values | {key: _fit(value, hints[key], f"{section}.{key}")}
    return cls(**values)


def _fit(value: Any, hint: Any, name: str) -> Any:
    """A TOML value as the type a setting has: lists are tuples, whole numbers pass for floats, "none" is None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and value in ("none", "None", ""):
        return None
    for option in options:
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_fit(item, typing.get_args(option)[0], name) for item in value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if typing.get_origin(option) is dict and isinstance(value, dict):
            return {key: _fit(item, typing.get_args(option)[1], f"{name}.{key}") for key, item in value.items()}
        if type(value) is option is not float:
            return value
    expected = " or ".join("list" if typing.get_origin(o) is tuple else o.__name__ for o in options)
    raise ValueError(f"{name} is {value!r}; expected {expected.replace('NoneType', 'none')}")


def _value(text: str) -> Any:
    """The right side of key=value: TOML where it is TOML, else the text itself, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
