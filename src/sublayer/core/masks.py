"""What each query may see. A mask is made once for a stack and serves all its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .layout import Layout, Packing, may_look


@dataclass(frozen=True)
class Mask:
    """`causal` alone asks for the kernel's own flag and holds no tensor. `packing` is that of queries and of keys."""

    causal: bool = False
    allowed: Tensor | None = None  # bool, broadcasts to (B, H, T, S)
    bias: Tensor | None = None  # float, broadcasts to (B, H, T, S); added to the scores
    window: int | None = None
    packing: tuple[Packing, Packing] | None = None
    blind: Tensor | None = None  # (B, 1, T, 1): queries that may see nothing, where kernels must be told

    def padded(self) -> Mask:
        """The mask of the same sequences on the padded grid, for kernels that know no packing."""
        assert self.packing is not None
        queries, keys = self.packing
        places = torch.arange(max(queries.max_length, keys.max_length), device=keys.offsets.device)
        allowed = visible(places[: queries.max_length], places[: keys.max_length], keys.valid, self.causal, self.window)
        return Mask(allowed=allowed, bias=self.bias, blind=_blind(allowed))

    def scores_bias(self, dtype: torch.dtype) -> Tensor | None:
        """`allowed` and `bias` as the one tensor a fused kernel takes."""
        if self.bias is None:
            return self.allowed
        return self.added(dtype).bias

    def added(self, dtype: torch.dtype) -> Mask:
        """The same, with all of it in `bias`. A GPU's kernels want it so, and would make it anew in every layer."""
        if self.allowed is None:
            return self if self.bias is None else replace(self, bias=self.bias.to(dtype))
        bias = torch.zeros_like(self.allowed, dtype=dtype) if self.bias is None else self.bias.to(dtype)
        return replace(self, allowed=None, bias=bias.masked_fill(~self.allowed, -torch.inf))


def visible(
    queries: Tensor, keys: Tensor, valid: Tensor | None = None, causal: bool = False, window: int | None = None
) -> Tensor | None:
    """(B or 1, 1, T, S) from the places of queries (..., T) and keys (..., S), and which keys (B, S) are real."""
    distance = queries[..., :, None] - keys[..., None, :]
    allowed = distance >= 0 if causal else None
    if window is not None:
        near = distance.abs() < window
        allowed = near if allowed is None else allowed & near
    if allowed is not None:
        allowed = allowed.unsqueeze(1) if allowed.dim() == 3 else allowed[None, None]
    if valid is not None:
        real = valid[:, None, None, :]
        allowed = real if allowed is None else allowed & real
    return allowed


def self_mask(
    layout: Layout,
    *,
    causal: bool,
    window: int | None = None,
    bias: nn.Module | None = None,
    places: Tensor | None = None,
) -> Mask:
    """For tokens that look at their own sequence; `places` says what the cache that holds it has in each slot."""
    if layout.packing is not None and layout.packing.row is not None:
        return row_mask(layout, layout, causal=causal, window=window, bias=bias)
    if layout.packing is not None:
        whole = torch.arange(layout.packing.max_length, device=layout.positions.device)
        scores = None if bias is None else bias(whole, whole)
        return Mask(causal, None, scores, window, (layout.packing, layout.packing))
    if places is not None:
        # A cache holds real tokens only: what is not later than a query is there and real. Only a slot that is used
        # again and again has a place of its own in each row, below 0 while nothing is in it.
        queries, keys, valid = layout.positions, places, None if places.dim() == 1 else places >= 0
        plain = queries.device.type == "cpu" and queries.size(-1) == 1 and window is None and bias is None
        if plain and may_look(queries) and bool((queries == keys.size(0) - 1).all()):
            return Mask()  # one new token in every row, and all that is read came before it
    else:
        keys = torch.arange(layout.positions.size(-1), device=layout.positions.device)
        queries, valid = keys, layout.valid
    scores = None if bias is None else bias(queries, keys)
    if places is None and valid is None and scores is None and window is None:
        return Mask(causal=causal)
    allowed = visible(queries, keys, valid, causal, window)
    return Mask(allowed=allowed, bias=scores, blind=_blind(allowed) if places is None else None)


def row_mask(
    queries: Layout, keys: Layout, *, causal: bool = False, window: int | None = None, bias: nn.Module | None = None
) -> Mask:
    """For rows of several sequences: a token sees those of its own; row r of queries looks at row r of keys."""
    assert queries.packing is not None and keys.packing is not None
    sides = []
    for layout, packing in ((queries, queries.packing), (keys, keys.packing)):
        assert packing.row is not None
        sides.append(packing.owners(layout.positions.size(0)).view(-1, packing.row))
    allowed = sides[0][:, None, :, None] == sides[1][:, None, None, :]  # (rows, 1, T, S)
    places = torch.arange(sides[0].size(1), device=allowed.device)
    near = visible(places, places, None, causal, window) if causal or window is not None else None
    # Within a sequence, places in the row are as far apart as positions.
    scores = None if bias is None else bias(places, places)
    return Mask(
        allowed=allowed if near is None else allowed & near, bias=scores, packing=(queries.packing, keys.packing)
    )


def cross_mask(layout: Layout, memory: Layout) -> Mask:
    """For tokens that look at a source: every real token of it."""
    if layout.packing is not None and memory.packing is not None:
        if layout.packing.row is not None:
            return row_mask(layout, memory)
        return Mask(packing=(layout.packing, memory.packing))
    if layout.packing is not None or memory.packing is not None:
        raise ValueError("source and target must both be packed, or neither")
    allowed = None if memory.valid is None else memory.valid[:, None, None, :]
    return Mask(allowed=allowed, blind=_blind(allowed))


def _blind(allowed: Tensor | None) -> Tensor | None:
    """In a cache a token finds itself at least. Elsewhere padding may see nothing, and one GPU kernel must be told."""
    return None if allowed is None or not allowed.is_cuda else ~allowed.any(-1, keepdim=True)
