"""Parameters chosen by patterns of their names: what stays frozen, and what learns slower or faster.

A pattern is one of the shell's, matched against the whole name or what follows a dot in it, and stands for all below
a module too: "embeddings.*", "encoder.blocks.0", "*.norm.bias".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

BLOCK = re.compile(r"(\w+)\.blocks\.(\d+)\.")


def matching(model: nn.Module, pattern: str, setting: str) -> list[nn.Parameter]:
    """The parameters that a pattern means, by any of their names; a pattern that means none is an error."""
    named = list(model.named_parameters(remove_duplicate=False))  # tied ones have several names
    forms = [form for start in (pattern, f"*.{pattern}") for form in (start, f"{start}.*")]
    found = [parameter for name, parameter in named if any(fnmatchcase(name, form) for form in forms)]
    if not found:
        near = difflib.get_close_matches(pattern, [name for name, _ in named], 3, 0.0)
        raise ValueError(f"{setting}: no parameter is called {pattern!r}; names are such as {', '.join(near)}")
    return list(dict.fromkeys(found))


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters that the patterns mean stay as they are."""
    for pattern in patterns:
        for parameter in matching(model, pattern, "train.freeze"):
            parameter.requires_grad_(False)


def learning_rate_factors(
    model: nn.Module, layer_decay: float = 1.0, patterns: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What the learning rate of each parameter, by its name, is multiplied by, where that is not 1.

    The head, and the norm after a stack, learn at the full rate; the last block of a stack `layer_decay` times as fast,
    the block below it that squared, and so on down to the embeddings (Clark et al. 2020, ELECTRA). An output matrix
    that is the token matrix learns as slowly as the embeddings. Patterns multiply in, in their order.
    """
    factors: dict[nn.Parameter, float] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    depths: dict[str, int] = {}  # blocks of each stack
    for name, _ in named:
        if found := BLOCK.match(name):
            depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    for name, parameter in named:
        stack, _, rest = name.partition(".")
        if found := BLOCK.match(name):
            below = depths[stack] - int(found[2])
        else:
            below = depths[stack] + 1 if stack in depths and not rest.startswith("final_norm") else 0
        factors[parameter] = min(factors.get(parameter, 1.0), layer_decay**below)
    for pattern, factor in (patterns or {}).items():
        for parameter in matching(model, pattern, "train.lr_factors"):
            factors[parameter] *= factor
    return {name: factors[one] for name, one in model.named_parameters() if factors[one] != 1.0}
