"""What comes out of a model: features to logits. Every head but the pooled ones works token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .feedforward import ACTIVATION
from .layers import Dropout, Linear, linear
from .layout import Packing, first_tokens
from .norm import make_norm


class Logits(nn.Module):
    """The output matrix over a vocabulary, often the token matrix itself, with its scale and bias."""

    packed: Tensor | None = None  # as in `Linear`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = config.logits_scale
        self.weight = nn.Parameter(torch.empty(config.output_vocab_size, config.d_model))
        bias = torch.zeros(config.output_vocab_size)
        if config.logits_bias == "learned":
            self.bias: Tensor | None = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias if config.logits_bias == "fixed" else None)

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """What the features are multiplied by, and the bias: for a loss that never holds all the logits."""
        return self.weight, self.bias

    def forward(self, features: Tensor) -> Tensor:
        features = features if self.scale == 1.0 else features * self.scale
        return linear(features, self.weight, self.bias, self.packed)


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.logits = Logits(config)

    def hidden(self, features: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the output matrix reads: for a loss that never holds all the logits."""
        return features

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.logits(features)


class MaskedLanguageModel(nn.Module):
    """BERT's: a dense layer, the activation and a norm before the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.d_model, config.d_model)
        self.activation = ACTIVATION[config.activation]
        self.norm = make_norm(config)
        self.logits = Logits(config)

    def hidden(self, features: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.norm(self.activation(self.dense(features)), valid)

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.logits(self.hidden(features, None if packing is not None else mask))


class Pooler(nn.Module):
    """One vector for a sequence: its first token through a dense layer, or as it is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.d_model, config.d_model) if config.pooler != "none" else None
        self.activation = torch.relu if config.pooler == "relu" else torch.tanh

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        first = first_tokens(features, mask, packing)
        return first if self.dense is None else self.activation(self.dense(first))


class NoHead(nn.Module):
    """The features themselves. A pooler that came with the model is kept, for those who call it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config) if config.pooler != "none" else None

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return features


class PooledVector(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.pooler(features, mask, packing)  # (B, D)


class SequenceClassifier(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)
        self.dropout = Dropout(config.dropout)
        self.classifier = Linear(config.d_model, config.num_labels)

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.classifier(self.dropout(self.pooler(features, mask, packing)))  # (B, labels)


class TokenClassifier(nn.Module):
    """A label for each token; with two labels, start and end of a span (question answering)."""

    def __init__(self, config: ModelConfig, num_labels: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.classifier = Linear(config.d_model, num_labels)

    def forward(self, features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        return self.classifier(self.dropout(features))  # (..., T, labels)


def make_head(config: ModelConfig) -> nn.Module:
    if config.head == "lm":
        return LanguageModel(config)
    if config.head == "mlm":
        return MaskedLanguageModel(config)
    if config.head == "pooler":
        return PooledVector(config)
    if config.head == "classifier":
        return SequenceClassifier(config)
    if config.head == "token-classifier":
        return TokenClassifier(config, config.num_labels)
    if config.head == "span":
        return TokenClassifier(config, 2)
    return NoHead(config)
