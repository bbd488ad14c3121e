"""Attention kernels: softmax(q·kᵀ·scale + bias)·v, fused where possible, or with the weights for those who look inside.

Queries are (B, T, H, E) or packed (N, H, E); keys and values have K heads, and each serves H/K query heads.
A query that may see nothing gets zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import dropout as dropped
from .layers import without_autocast
from .layout import may_look
from .masks import Mask

HALF = (torch.bfloat16, torch.float16)
FEW = 256  # keys up to which a CPU finds the way back sooner in float32


class Kernel(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float, dropout: float
    ) -> Tensor: ...


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> Tensor:
    if mask.packing is None:
        return _padded(query, key, value, mask, scale, dropout)
    varied = mask.packing[0].row is None
    if varied and query.is_cuda and query.dtype in HALF and mask.bias is None and not dropout:
        return _packed(query, key, value, mask, scale)
    queries, keys = mask.packing
    if queries.row is not None:
        return _padded(queries.rows(query), keys.rows(key), keys.rows(value), mask, scale, dropout).flatten(0, 1)
    out = _padded(queries.pad(query), keys.pad(key), keys.pad(value), mask.padded(), scale, dropout)
    return queries.unpad(out, query.size(0))


def _padded(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, dropout: float) -> Tensor:
    if dropout and query.device.type == "cpu":  # its fused kernel drops nothing
        return with_weights(query, key, value, replace(mask, packing=None), scale=scale, dropout=dropout)[0]
    if query.device.type == "cpu" and query.dtype in HALF and query.requires_grad and key.size(1) <= FEW:
        with without_autocast(query):
            return _padded(query.float(), key.float(), value.float(), mask, scale, dropout).to(query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # (B, H, T, E)
    bias = mask.scores_bias(query.dtype)
    heads, tokens = query.shape[1:3]
    groups = heads // key.size(1)
    if groups > 1 and tokens == 1:
        # One query: the heads of a group become queries of their one key-value head, and nothing is copied.
        query = query.reshape(query.size(0), -1, groups, query.size(-1))
        bias = _fold(bias, groups)
    elif groups > 1 and query.is_cuda and (bias is not None or query.dtype not in HALF):
        # On CUDA only the flash kernel knows groups, and it takes no mask.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=mask.causal and tokens > 1,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    if query.is_cuda and mask.blind is not None:
        out = out.masked_fill(mask.blind, 0.0)  # cuDNN's kernel spreads a blind query over all keys
    return out.reshape(out.size(0), heads, tokens, -1).transpose(1, 2)  # (B, T, H, E)


def _fold(bias: Tensor | None, groups: int) -> Tensor | None:
    """(..., H, 1, S) to (..., K, groups, S), as the queries were; what is the same for all heads stays as it is."""
    if bias is None or bias.dim() < 3 or bias.size(-3) == 1:
        return bias
    return bias.reshape(*bias.shape[:-3], -1, groups, bias.size(-1))


def _packed(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import, and only a GPU can use it

    assert mask.packing is not None
    queries, keys = mask.packing
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    reach = -1 if mask.window is None else mask.window - 1
    out = varlen_attn(
        query,
        key,
        value,
        queries.offsets,
        keys.offsets,
        queries.max_length,
        keys.max_length,
        scale=scale,
        window_size=(reach, 0 if mask.causal else reach),
    )
    assert isinstance(out, Tensor)
    return out


def with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same output, and the weights (B, H, T, S); for a packed batch, the weights on the padded grid."""
    if mask.packing is not None:
        queries, keys = mask.packing
        if queries.row is not None:
            rows = (queries.rows(query), keys.rows(key), keys.rows(value))
            out, weights = with_weights(*rows, replace(mask, packing=None), scale=scale, dropout=dropout)
            return out.flatten(0, 1), weights
        padded = (queries.pad(query), keys.pad(key), keys.pad(value), mask.padded())
        out, weights = with_weights(*padded, scale=scale, dropout=dropout)
        return queries.unpad(out, query.size(0)), weights
    with without_autocast(query):  # it would have the weights in float32
        return _weighed(query.to(value.dtype), key.to(value.dtype), value, mask, scale, dropout)


def _weighed(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    groups = query.size(2) // key.size(2)
    query, key, value = (x.transpose(1, 2) for x in (query * scale, key, value))  # (B, H, T, E)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1)
    if mask.bias is not None:
        scores += mask.bias.to(scores.dtype)
    allowed, blind = mask.allowed, mask.blind
    if mask.causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        lowest = torch.finfo(scores.dtype).min / 2  # no -inf: a query that may see nothing would get NaN
        scores += torch.zeros_like(allowed, dtype=scores.dtype).masked_fill_(~allowed, lowest)
        blind = ~allowed.any(-1, keepdim=True)
    weights = scores.softmax(-1)
    if blind is not None and (not may_look(blind) or bool(blind.any())):
        weights = weights.masked_fill(blind, 0.0)
    out = (dropped(weights, dropout) if dropout else weights) @ value
    return out.transpose(1, 2), weights
