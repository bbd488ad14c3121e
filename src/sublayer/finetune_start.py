"""A run that begins with a trained model: all of it learns, or an adapter beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import lora
from .config import ModelConfig
from .core.attention import Attention
from .core.feedforward import FeedForward
from .data import Tokenizer
from .data.settings import ROLES
from .data.sources import Source
from .data.tasks import TASKS, Context
from .data.vocabulary import Vocabulary
from .hub import load_model, save_model
from .hub.download import resolve
from .hub.heads import config_with_head, rebuilt
from .hub.save import describe, label_names, write_json
from .hub.tokenizer import load_tokenizer
from .models import Model
from .start import check_shape
from .training.recipe import Recipe

LABELLED = ("classifier", "token-classifier")
# What may be changed of a trained model: nothing that its weights depend on.
CHANGES = ("path", "dropout", "attention_dropout", "ffn_dropout")


class Tuned:
    """The model of a folder, with another head where the objective needs one."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.say = recipe, say
        self.path = resolve(recipe.model["path"])
        for key in recipe.model:
            if key not in CHANGES:
                raise ValueError(f"model.{key} cannot be changed in a trained model; only {', '.join(CHANGES[1:])} can")
        self.config: ModelConfig = load_model(self.path, "meta").config
        changes = {key: value for key, value in recipe.model.items() if key != "path"}
        ModelConfig.from_dict(self.config.to_dict() | changes)  # tells what is wrong with them
        check_shape(recipe.data.objective, self.config.shape)
        if (recipe.data.objective == "classify-image") != self.config.image_input:
            reads = "pictures" if self.config.image_input else "text"
            raise ValueError(f"{self.path} reads {reads}; objective {recipe.data.objective!r} is not for it")
        longest = self.config.max_positions
        if not self.config.image_input and recipe.data.max_length > longest:
            raise ValueError(f"data.max_length is {recipe.data.max_length}, and the model has {longest} positions")
        self.described: dict[str, Any] = {}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        size = self.config.image_size or 0
        return self.config.num_channels, size, size

    def tokenizer(self, source: Source, say: Callable[[str], None]) -> Tokenizer:
        return load_tokenizer(self.path)

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        start = self.config.start_id
        role = next((role for role in ROLES if start is not None and tokenizer.special(role) == start), None)
        if self.config.shape == "encoder-decoder" and role is None:
            raise ValueError(f"the model starts its answers with token {start}, which has no role in its tokenizer")
        return Vocabulary(tokenizer, role or "pad")

    def model(self, context: Context, device: torch.device) -> Model:
        model, new = self._base(context, device)
        if new:
            about = f" for {len(model.labels)} labels: {', '.join(model.labels[:8])}" if model.labels else ""
            self.say(f"a new head{about}")
        settings = self.recipe.lora
        if settings is not None:
            heads = {name.rpartition(".")[0] for name in new}
            torch.manual_seed(self.recipe.train.seed)
            lora.add(
                model, settings.rank, settings.alpha or 2.0 * settings.rank, settings.targets, settings.dropout,
                rslora=settings.rslora, dora=settings.dora, train_also=sorted({*settings.train_also, *heads}),
            )  # fmt: skip
        return model

    def _base(self, context: Context, device: torch.device) -> tuple[Model, list[str]]:
        """The trained model, under the head the objective needs, and the names of the parameters that are new."""
        # Beside an adapter the weights only stand; what learns is kept in float32. A CPU is slow in anything less.
        stays = self.recipe.lora is not None and device.type != "cpu"
        bits = None if self.recipe.lora is None else self.recipe.lora.bits
        if bits is None:
            model = load_model(self.path, device, None if stays else torch.float32)
        else:  # the whole matrices never go to the device
            model = load_model(self.path, "cpu", torch.bfloat16 if stays else torch.float32)
        head = TASKS[self.recipe.data.objective].head
        labels = tuple(context.labels.sorted()) if head in LABELLED else ()
        known = _label_names(model)
        if labels and model.config.head == head and set(labels) <= set(known):
            context.labels.arranged = labels = known
        fits = model.config.head == head and (not labels or labels == known)
        new: list[str] = []
        if not fits:
            config = config_with_head(model, head, len(labels) or model.config.num_labels)
            model, new = rebuilt(model, config, self.recipe.train.seed)
        set_dropout(model, **{key: value for key, value in self.recipe.model.items() if key != "path"})
        model.labels = labels
        self.described = describe(model)[0] | label_names(model)
        if bits is not None:
            lora.quantize(model, bits, device=device)
        return model, new

    def save(self, model: Model, folder: Path) -> None:
        if self.recipe.lora is None:
            save_model(model, folder)
            return
        lora.save(model, folder, base=str(self.path.resolve()))
        write_json(folder / "config.json", self.described)

    def load(self, folder: Path, context: Context, device: torch.device) -> Model:
        if self.recipe.lora is None:
            return load_model(folder, device)
        model, _ = self._base(context, device)
        lora.load(model, folder)
        return model


def set_dropout(
    model: Model,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    ffn_dropout: float | None = None,
) -> None:
    """Change how much is dropped in training; what the checkpoint says of itself stays."""
    inner = {id(part.dropout) for part in model.modules() if isinstance(part, FeedForward)}
    for part in model.modules():
        if isinstance(part, Attention) and attention_dropout is not None:
            part.dropout = attention_dropout
        if isinstance(part, nn.Dropout):
            chosen = ffn_dropout if id(part) in inner else dropout
            part.p = part.p if chosen is None else chosen


def _label_names(model: Model) -> tuple[str, ...]:
    """What the checkpoint calls its classes, in their order; nothing where it has no names of its own for them."""
    names = (model.origin or {}).get("id2label")
    if not isinstance(names, dict):
        return ()
    ordered = tuple(str(names.get(str(n))) for n in range(model.config.num_labels))
    return () if ordered == tuple(f"LABEL_{n}" for n in range(len(ordered))) else ordered
