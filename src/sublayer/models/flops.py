"""The operations a model takes, counted from its layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..config import ModelConfig
from ..core.attention import Attention
from ..core.heads import Logits, NoHead, PooledVector, SequenceClassifier
from ..core.stack import Stack


def flops_per_token(config: ModelConfig, parameters: int, length: float) -> float:
    """6·N + 12·L·H·E·T for a model of one stack, forward and backward (PaLM, appendix B).

    N counts what is multiplied: no embedding or position tables, but the output matrix, tied or not. A causal model is
    counted as if each token saw all T, as is the custom.
    """
    layers = config.num_encoder_layers + config.num_decoder_layers
    return 6.0 * parameters + attention_flops(config, length, layers)


def attention_flops(config: ModelConfig, length: float, layers: int = 1) -> float:
    """Scores and weighted sum for one query over `length` keys: two products forward, four backward, 2 FLOPs each."""
    return 12.0 * layers * config.num_heads * config.head_size * length


def flops(model: nn.Module, config: ModelConfig, tokens: dict[str, int], lengths: dict[str, float]) -> float:
    """The operations of one training step, forward and backward, over this many tokens (padding left out).

    An encoder reads the tokens called "source", a decoder those called "target"; `lengths` has the mean length of a
    sequence of each. In an encoder-decoder the cross-attention makes keys and values of source tokens, and all the rest
    of the decoder, and the output matrix, works on target tokens.
    """
    total = 0.0
    stacks = [part for part in model.modules() if isinstance(part, Stack)]
    for stack in stacks:
        side = "target" if stack.causal else "source"
        attention = sum(attention_flops(config, reach) for reach in _reaches(stack, lengths[side]))
        total += tokens[side] * (6 * weights(stack.blocks.modules()) + attention)
        # The class token is none of the patches, and pixels want no gradient: one product less.
        patches = sum(part.weight.numel() for part in stack.embeddings.modules() if isinstance(part, nn.Conv2d))
        total += 4 * patches * (tokens[side] - tokens[side] / lengths[side])
        for block in stack.blocks:
            if isinstance(block.cross, nn.Module):
                total += 6 * (tokens["source"] - tokens["target"]) * weights(_source_side(block.cross))
                total += tokens["target"] * attention_flops(config, lengths["source"])
    side = "target" if any(stack.causal for stack in stacks) else "source"
    return total + _head_flops(model, stacks, tokens[side], lengths[side])


def _head_flops(model: nn.Module, stacks: list[Stack], tokens: int, length: float) -> float:
    """A pooled head works once for a sequence, every other for each token."""
    within = {id(part) for stack in stacks for part in stack.modules()}
    head = [part for part in model.modules() if id(part) not in within]
    if any(isinstance(part, NoHead) for part in head):
        return 0.0
    pooled = any(isinstance(part, PooledVector | SequenceClassifier) for part in head)
    return 6 * weights(head) * (tokens / length if pooled else tokens)


def weights(parts: Iterable[nn.Module]) -> int:
    """The numbers in the matrices that a token's vector is multiplied with."""
    return sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear | Logits))


def _source_side(cross: nn.Module) -> list[nn.Module]:
    return [matrix for part in cross.modules() if isinstance(part, Attention) for matrix in (part.key, part.value)]


def _reaches(stack: Stack, length: float) -> list[float]:
    """How many keys a token of each layer looks at: all of its sequence, or those in its window."""
    widths = [window if window is None or stack.causal else 2 * window - 1 for window in stack.windows]
    return [length if width is None else min(length, width) for width in widths]
