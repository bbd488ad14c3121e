"""A batch to its loss: the one place where model, objective and layout meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.heads import LanguageModel, MaskedLanguageModel, SequenceClassifier, TokenClassifier
from ..core.layout import Packing
from ..data.batches import Batch
from ..models import Model
from .loss import correct, linear_cross_entropy


class BatchLoss(nn.Module):
    """The summed loss of a batch. A module of its own, so that what wraps a model for many processes sees one call."""

    def __init__(
        self,
        model: Model,
        smoothing: float = 0.0,
        chunk: int | None = None,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.smoothing, self.chunk = model, smoothing, chunk
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, device=model.device)

    def share(self, batch: Batch) -> float:
        """What the loss of a batch is divided by for a mean: its targets, each with the weight of its class."""
        if self.class_weights is None or not batch.targets:
            return batch.targets
        labels = batch.labels.flatten()
        labels = labels if batch.places is None else labels[batch.places]
        return float(self.class_weights.cpu()[labels[labels >= 0]].sum(dtype=torch.float64))

    def forward(self, batch: Batch, count: bool = False) -> tuple[Tensor, Tensor]:
        """The sum of losses, and, if `count`, how many answers were right."""
        model, head = self.model, self.model.head
        arguments = model_arguments(batch, model)
        pooled = {"first": True} if isinstance(head, SequenceClassifier) else {}  # it reads nothing else
        features = model.features(**arguments, **pooled)  # type: ignore[operator]
        labels = batch.labels
        nothing = torch.zeros((), dtype=torch.long, device=labels.device)
        if isinstance(head, LanguageModel | MaskedLanguageModel):
            features, labels = select(features, labels, batch.places)
            hidden = head.hidden(features)
            if head.logits.scale != 1.0:
                hidden = hidden * head.logits.scale
            weight, bias = head.logits.matrix()
            loss = linear_cross_entropy(
                hidden, weight, bias, labels, smoothing=self.smoothing, chunk=self.chunk, ignored=bool(batch.rows)
            )
            return loss, correct(hidden, weight, bias, labels, self.chunk) if count else nothing
        if isinstance(head, TokenClassifier) and model.config.head == "span":
            logits = head(features).float()  # (B, T, 2)
            mask = batch.masks.get("ids")
            if mask is not None:
                logits = logits.masked_fill(~mask[..., None], -torch.inf)
            logits = logits.transpose(1, 2)  # (B, 2, T): where the answer starts, where it ends
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 2
            hits = logits.argmax(-1).eq(labels).all(-1).sum() if count else nothing
            return loss, hits
        if isinstance(head, TokenClassifier):
            features, labels = select(features, labels, batch.places)
            logits = head(features)
        else:
            assert isinstance(head, SequenceClassifier)
            mask = None if features.size(1) == 1 else arguments.get("mask")
            logits = head(features, mask, arguments.get("packing"))
        loss = F.cross_entropy(
            logits.float(), labels, self.class_weights, reduction="sum", label_smoothing=self.smoothing
        )
        return loss, logits.argmax(-1).eq(labels).sum() if count else nothing


def select(features: Tensor, labels: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N, D) and (N,): the tokens whose label counts."""
    features, labels = features.reshape(-1, features.size(-1)), labels.reshape(-1)
    if places is None:
        return features, labels
    return features.index_select(0, places), labels.index_select(0, places)


def model_arguments(batch: Batch, model: Model) -> dict[str, Any]:
    """What `model.features` is called with."""
    if "pixels" in batch.inputs:
        return {"ids": batch.inputs["pixels"]}
    arguments: dict[str, Any] = dict(batch.inputs)
    for name in batch.inputs:
        prefix = "" if name == "ids" else f"{name}_"
        if name in batch.lengths:
            offsets = F.pad(batch.lengths[name].cumsum(0), (1, 0)).to(torch.int32)
            arguments[f"{prefix}packing"] = Packing(offsets, batch.longest[name], batch.rows.get(name))
        elif name in batch.masks and not _sees_no_padding(name, model):
            arguments[f"{prefix}mask"] = batch.masks[name]
    return arguments


def _sees_no_padding(name: str, model: Model) -> bool:
    """Padding after the tokens of a causal stack is never looked at, and needs no mask; its own output is not used."""
    causal = name == "target" or model.config.shape == "decoder"
    return causal and model.config.norm != "batchnorm"
