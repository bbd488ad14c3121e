"""Which tokens of a tensor belong to which sequence, and where in it they stand.

A stack runs on padded tokens (B, T, D) or on packed tokens (N, D). Only positions, masks and the attention kernel look
at the layout; everything else works token by token and cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end without padding: sequence s is tokens offsets[s] to offsets[s + 1].

    With `row`, no sequence crosses a multiple of it: the N tokens are then N / row rows as well, and attention can work
    on rows of many short sequences at once, each seeing its own tokens only.
    """

    offsets: Tensor  # (sequences + 1,) int32; the last one is N
    max_length: int  # an upper bound will do
    row: int | None = None

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Packing:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths is {list(lengths)}; a packed batch needs sequences of at least one token")
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        return cls(offsets, max(lengths))

    def check(self, tokens: Tensor) -> None:
        if tokens.dim() != 1:
            raise ValueError(f"packed tokens have shape {tuple(tokens.shape)}; expected one dimension, end to end")
        if may_look(self.offsets) and int(self.offsets[-1]) != tokens.size(0):
            raise ValueError(f"the packing is of {int(self.offsets[-1])} tokens, and {tokens.size(0)} were given")

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @property
    def valid(self) -> Tensor:
        """(sequences, max_length): which places of the padded grid hold a token."""
        return torch.arange(self.max_length, device=self.offsets.device) < self.lengths[:, None]

    def owners(self, tokens: int) -> Tensor:
        """(N,): the sequence each token belongs to."""
        places = torch.arange(tokens, device=self.offsets.device, dtype=torch.int32)
        owners = torch.searchsorted(self.offsets, places, right=True) - 1
        return owners.clamp(max=self.offsets.size(0) - 2)

    def positions(self, tokens: int) -> Tensor:
        places = torch.arange(tokens, device=self.offsets.device)
        return places - self.offsets[self.owners(tokens)]

    def rows(self, x: Tensor) -> Tensor:
        """(N, ...) to (rows, row, ...)."""
        assert self.row is not None
        return x.view(-1, self.row, *x.shape[1:])

    def pad(self, x: Tensor) -> Tensor:
        """(N, ...) to (sequences, max_length, ...); places without a token repeat some other one."""
        places = self.offsets[:-1, None] + torch.arange(self.max_length, device=x.device)
        return x[places.clamp(max=x.size(0) - 1)]

    def unpad(self, x: Tensor, tokens: int) -> Tensor:
        """The inverse of `pad`: (sequences, max_length, ...) to (N, ...)."""
        return x.flatten(0, 1)[self.owners(tokens) * self.max_length + self.positions(tokens)]


@dataclass(frozen=True)
class Layout:
    positions: Tensor  # (T,), (B, T) or (N,): where each token stands in its own sequence
    valid: Tensor | None = None  # (B, T) bool, True for a real token; None: all are real
    packing: Packing | None = None

    @classmethod
    def of(
        cls, tokens: Tensor, mask: Tensor | None = None, packing: Packing | None = None, past: Tensor | None = None
    ) -> Layout:
        """The layout of `tokens`, (B, T, ...) or packed (N, ...); `past` (B,) is how many came before, in a cache."""
        if packing is not None:
            if mask is not None or past is not None:
                raise ValueError("a packed batch has no padding and no cache; give packing alone")
            packing.check(tokens)
            return cls(packing.positions(tokens.size(0)), packing=packing)
        if tokens.dim() < 2 or tokens.size(1) == 0:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected (batch, tokens), at least one each")
        batch, length = tokens.shape[:2]
        if past is not None and past.size(0) != batch:
            raise ValueError(f"a batch of {batch} does not fit a cache of {past.size(0)} rows; make one for this batch")
        if mask is None:
            positions = torch.arange(length, device=tokens.device)
        else:
            if mask.shape != (batch, length) or mask.dtype != torch.bool:
                raise ValueError(
                    f"mask is {mask.dtype} of shape {tuple(mask.shape)}; expected torch.bool of shape "
                    f"{(batch, length)}, True where there is a real token"
                )
            if may_look(mask) and bool((mask[:, 1:] & ~mask[:, :-1]).sum(1).add(mask[:, 0]).gt(1).any()):
                raise ValueError("mask has padding between real tokens; it may stand before them or after them only")
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        if past is not None:
            positions = past[:, None] + positions
        return cls(positions, mask)

    @property
    def lengths(self) -> Tensor:
        """How long each token's sequence is, in a shape that broadcasts with `positions`."""
        if self.packing is not None:
            return self.packing.lengths[self.packing.owners(self.positions.size(0))]
        return self.positions.amax(-1, keepdim=True) + 1


_trusting = False


@contextmanager
def trusting() -> Iterator[None]:
    """Skip the checks that read values, each of which makes the host wait for a GPU: for batches known to be right."""
    global _trusting
    before, _trusting = _trusting, True
    try:
        yield
    finally:
        _trusting = before


def may_look(values: Tensor) -> bool:
    """Whether a check may read these values: not while compiling or capturing, where they are not known yet."""
    if _trusting:
        return False
    if torch.compiler.is_compiling() or values.is_meta or values.numel() == 0:
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def first_tokens(features: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
    """(B, D): the first real token of each sequence, whichever side the padding is on."""
    if packing is not None:
        return features[packing.offsets[:-1]]
    if mask is None:
        return features[:, 0]
    return features[torch.arange(features.size(0), device=features.device), mask.int().argmax(1)]
