"""Where the model of a run comes from, and how it is kept: here, fresh weights of a recipe's preset, saved whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from .config import ModelConfig
from .data import Tokenizer
from .data.sources import Source, open_tokenizer
from .data.tasks import TASKS, Context
from .data.vocabulary import Vocabulary
from .hub import load_model, save_model
from .models import Model, build
from .presets import preset
from .training.recipe import Recipe


class Start(Protocol):
    """What a run must know of its model; training itself does not care where the model comes from."""

    @property
    def image_shape(self) -> tuple[int, int, int]: ...

    def tokenizer(self, source: Source, say: Callable[[str], None]) -> Tokenizer: ...

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary: ...

    def model(self, context: Context, device: torch.device) -> Model:
        """As it stands before the first step, with the labels of the data where it has a head for them."""

    def save(self, model: Model, folder: Path) -> None: ...

    def load(self, folder: Path, context: Context, device: torch.device) -> Model:
        """What `save` wrote, as a model whose state fits that of `model`."""


class Fresh:
    def __init__(self, recipe: Recipe) -> None:
        if "path" in recipe.model:
            raise ValueError("the recipe begins with the model model.path; use sublayer finetune")
        if recipe.lora is not None:
            raise ValueError("the recipe has a section [lora], an adapter to a trained model; use sublayer finetune")
        self.recipe, self.values = recipe, model_values(recipe)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        size = self.values.get("image_size") or 0
        return self.values.get("num_channels", 3), size, size

    def tokenizer(self, source: Source, say: Callable[[str], None]) -> Tokenizer:
        return open_tokenizer(source, self.recipe.data, self.recipe.tokenizer, say)

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        return Vocabulary.of(tokenizer, self.recipe.tokenizer)

    def model(self, context: Context, device: torch.device) -> Model:
        config = model_config(self.recipe, self.values, context)
        model = build(config, device=device, seed=self.recipe.train.seed)
        model.labels = tuple(context.labels.sorted())
        return model

    def save(self, model: Model, folder: Path) -> None:
        save_model(model, folder)

    def load(self, folder: Path, context: Context, device: torch.device) -> Model:
        return load_model(folder, device)


def check_shape(objective: str, shape: Any) -> None:
    task = TASKS[objective]
    if shape not in task.shapes:
        raise ValueError(
            f"objective {objective!r} trains a model of shape {' or '.join(task.shapes)}; "
            f"this one is {shape!r}; choose another model.preset, or data.objective"
        )


def model_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe's model as far as it is known before the data: the preset with its changes, and the head."""
    given = dict(recipe.model)
    name = given.pop("preset", None)
    values = (preset(name).to_dict() if name is not None else {}) | given
    check_shape(recipe.data.objective, values.get("shape"))
    task = TASKS[recipe.data.objective]
    if recipe.data.objective == "classify-image" and not isinstance(values.get("image_size"), int):
        raise ValueError("classify-image needs a model that reads images; set model.image_size and model.patch_size")
    values["head"] = task.head
    if task.head != "classifier":
        values["pooler"] = "none"
    if name is not None and values["logits_scale"] == preset(name).d_model ** -0.5 != 1.0:
        values["logits_scale"] = given.get("logits_scale", values["d_model"] ** -0.5)  # it follows the width, in T5
    return values


def model_config(recipe: Recipe, values: dict[str, Any], context: Context) -> ModelConfig:
    """The configuration, with what follows from the data: vocabulary, special tokens, labels, room for tokens."""
    given, values = recipe.model, dict(values)
    if values["head"] in ("classifier", "token-classifier"):
        values["num_labels"] = len(context.labels.names)
    if context.vocabulary is not None:
        words = context.vocabulary
        size = -(-words.size // 8) * 8
        if given.get("vocab_size", size) < words.size:
            raise ValueError(f"model.vocab_size is {given['vocab_size']}, and the tokenizer has {words.size} tokens")
        values["vocab_size"] = given.get("vocab_size", size)
        for role in ("pad", "bos", "eos"):
            values[f"{role}_id"] = words.id(role)
        values["start_id"] = words.id(words.start_role) if values["shape"] == "encoder-decoder" else None
        if "max_positions" not in given:
            values["max_positions"] = max(recipe.data.max_length + 2, 64)
    return ModelConfig.from_dict(values)
