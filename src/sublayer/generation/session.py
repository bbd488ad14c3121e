"""A model at work on some texts: what it has read, and the logits of what comes next."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..config import ModelConfig
from ..core.cache import Cache
from ..models import Decoder, EncoderDecoder, Model
from .replay import Recorder, likeness

PIECE = 1024  # tokens of a prompt that are read at once
SHARED = 16  # a beginning this long, if all prompts have it, is read once for all
GRAIN = 64  # room is made in multiples of this, so that the next call finds enough

_spare: WeakKeyDictionary[Model, Spare] = WeakKeyDictionary()  # of the last call, for the next


class Spare(NamedTuple):
    cache: Cache
    recorder: Recorder  # what was recorded in that memory
    likeness: Hashable  # of the model, when it was


class Session:
    """Prompts (B, T) of a decoder, or sources of an encoder-decoder, read at once; then a token a row, step by step."""

    def __init__(
        self, model: Model, ids: Tensor, mask: Tensor | None, max_new_tokens: int, start_id: int | None = None
    ) -> None:
        check(model, ids, mask)
        self.model = model
        batch = ids.size(0)
        read = ids.size(1) - 1 if isinstance(model, Decoder) else 0
        room = read + max_new_tokens  # the last token is not fed back
        self._whole, self._recorder, self._likeness = _borrow(model, batch, room)
        if ids.is_cuda:  # which can look at some more as well; calls of about one length then share what is recorded
            room = min(_roomy(room), self._whole.capacity)
        self.cache = self._whole.rows(0, batch, room)
        self._shape = batch, room
        if isinstance(model, Decoder):
            self.said, self.real = ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            self.logits = model.head(self._read(model))
        else:
            assert isinstance(model, EncoderDecoder)  # only these two have the head
            self.said = torch.full((batch, 1), start_of(model.config, start_id), device=ids.device)
            self.real = torch.ones_like(self.said, dtype=torch.bool)
            self.logits = model(ids, self.said, source_mask=mask, cache=self.cache)[:, -1]

    def step(self, token: Tensor) -> Tensor:
        """The logits (B, V) after one more token (B,) in each row; on a GPU, they are there until the next step."""
        return self._recorder(self._shape, self._step, token)

    def _step(self, token: Tensor) -> Tensor:
        return self.feed(token[:, None])[:, -1]

    def feed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits (B, T, V) after each of some more tokens (B, T); a row has those where its mask is True."""
        if isinstance(self.model, Decoder):
            logits: Tensor = self.model(tokens, mask=mask, cache=self.cache)
        else:
            logits = self.model(None, tokens, target_mask=mask, cache=self.cache)
        return logits

    def spread(self, times: int) -> None:
        """Each row several times over, next to each other; the source of an encoder-decoder stays as it is."""
        self.cache, self._recorder = self.cache.spread(times), Recorder()

    def reorder(self, parents: Tensor) -> None:
        """Row r goes on from what row parents[r] has read."""
        self.cache.reorder(parents)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the memory for the next call, unless it is more than the model itself takes."""
        if self._whole.bytes <= sum(parameter.nbytes for parameter in self.model.parameters()):
            self._whole.reset()
            _spare[self.model] = Spare(self._whole, self._recorder, self._likeness)

    def _read(self, model: Decoder) -> Tensor:
        """The features (B, D) of each prompt's last token."""
        ids, mask = self.said, None if bool(self.real.all()) else self.real
        scaling = model.config.rotary_scaling
        if scaling is not None and scaling.kind == "dynamic":  # angles that depend on how long the whole prompt is
            return _last(model.features(ids, mask=mask, cache=self.cache), mask)
        shared = _shared(ids, self.real)
        if shared >= SHARED:
            ids, real = _to_the_left(ids, self.real)
            _in_pieces(model, ids[:1, :shared], None, self.cache.rows(0, 1))
            self.cache.reorder(torch.zeros(len(ids), dtype=torch.long, device=ids.device))
            ids, mask = ids[:, shared:], None if mask is None else real[:, shared:]
        return _in_pieces(model, ids, mask, self.cache)


def check(model: Model, ids: Tensor, mask: Tensor | None) -> None:
    if model.config.head != "lm":
        raise ValueError(f"head {model.config.head!r} gives no next token; generation needs a model with head 'lm'")
    if ids.dim() != 2 or ids.size(1) == 0:
        raise ValueError(f"ids have shape {tuple(ids.shape)}; expected (batch, tokens), at least one token each")
    if mask is not None and not bool(mask.any(1).all()):
        raise ValueError("a row of the mask has no real token; every prompt needs at least one")


def start_of(config: ModelConfig, start_id: int | None) -> int:
    for candidate in (start_id, config.start_id, config.bos_id, config.pad_id):
        if candidate is not None:
            return candidate
    raise ValueError("the model's configuration has no start_id; give the id its decoder starts with")


def _borrow(model: Model, batch: int, capacity: int) -> Spare:
    """The cache that the last call left, if it is large enough, or a new one."""
    spare = _spare.pop(model, None)
    # A source is in memory of its own, and what was recorded with one is of no use for the next.
    now = likeness(model) if model.device.type == "cuda" and isinstance(model, Decoder) else None
    if spare is not None and spare.cache.serves(batch, capacity, model.device, model.cache_dtype):
        same = now is not None and now == spare.likeness
        return Spare(spare.cache, spare.recorder if same else Recorder(), now)
    config, scaling = model.config, model.config.rotary_scaling
    whole = scaling is not None and scaling.kind == "dynamic"
    limit = max(capacity, config.max_positions)
    return Spare(model.make_cache(batch, min(_roomy(capacity), limit), None if whole else PIECE), Recorder(), now)


def _roomy(tokens: int) -> int:
    return -(-tokens // GRAIN) * GRAIN


def _in_pieces(model: Decoder, ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
    """Read (B, T) some tokens at a time; the features (B, D) of each row's last real token."""
    out = None
    for start in range(0, ids.size(1), PIECE):
        real = None if mask is None else mask[:, start : start + PIECE]
        features = _last(model.features(ids[:, start : start + PIECE], mask=real, cache=cache), real)
        out = features if out is None or real is None else torch.where(real.any(1, keepdim=True), features, out)
    assert out is not None
    return out


def _shared(ids: Tensor, real: Tensor) -> int:
    """How many tokens all prompts begin with; each keeps one at least to itself."""
    if len(ids) == 1 or ids.size(1) <= SHARED:
        return 0
    tokens, kept = _to_the_left(ids, real)
    alike = (tokens == tokens[:1]).all(0) & kept.all(0)
    return min(int(alike.int().cumprod(0).sum()), int(real.sum(1).min()) - 1)


def _to_the_left(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The same texts with all padding behind them."""
    order = (~real).int().sort(dim=1, stable=True).indices
    return ids.gather(1, order), real.gather(1, order)


def _last(features: Tensor, mask: Tensor | None) -> Tensor:
    """(B, D): the last real token of each row."""
    if mask is None:
        return features[:, -1]
    last = mask.size(1) - 1 - mask.flip(1).int().argmax(1)
    return features[torch.arange(features.size(0), device=features.device), last]
