"""`generate`: new tokens for a decoder's prompt, or a target for an encoder-decoder's source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..models import Model
from .beam import Beams, beam_search
from .choose import Chooser
from .options import Options, adjuster, ends_of, pad_of
from .pack import packed
from .replay import Recorder, compiled
from .session import Session
from .speculative import speculate


def generate(
    model: Model,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    temperature: float = 0.0,
    early_stopping: bool | str = False,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    start_id: int | None = None,
    seed: int | None = None,
    **more: Any,
) -> Tensor:
    """New ids only, (B, N), padded after the end of each row. Temperature 0 takes the most likely token.

    `ids` (B, T) is the prompt of a decoder, padded on either side with `mask` False there, or the source of an
    encoder-decoder. Special ids left at None are those of the model's configuration. `Options` has the rest.
    """
    options = make_options(
        max_new_tokens=max_new_tokens, num_beams=num_beams, length_penalty=length_penalty, temperature=temperature,
        early_stopping=early_stopping, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        eos_id=eos_id, pad_id=pad_id, start_id=start_id, seed=seed, **more,
    )  # fmt: skip
    if options.num_beams > 1:
        beams = search(model, ids, options, mask=mask)
        return beams.tokens[:, 0, : int(beams.lengths[:, 0].max())]
    return torch.stack(list(stream(model, ids, options, mask=mask)), 1)


def make_options(**values: Any) -> Options:
    """`Options`, with one clear line for a name that is none of its own."""
    from ..config import unknown

    known = list(Options.__dataclass_fields__)
    for name in values:
        if name not in known:
            raise ValueError(unknown("option of generate", name, known))
    return Options(**values)


@torch.inference_mode()
def search(model: Model, ids: Tensor, options: Options, *, mask: Tensor | None = None) -> Beams:
    """The best answers by beam search, with their scores."""
    with _evaluating(model, options), Session(model, ids, mask, options.max_new_tokens, options.start_id) as session:
        return beam_search(
            session, adjuster(model, session, options), beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            ends=torch.tensor(ends_of(model.config, options), dtype=torch.long, device=ids.device),
            pad=pad_of(model.config, options), length_penalty=options.length_penalty,
            length_form=options.length_form, early_stopping=options.early_stopping, groups=options.beam_groups,
            diversity=options.diversity_penalty,
        )  # fmt: skip


@torch.inference_mode()
def stream(model: Model, ids: Tensor, options: Options, *, mask: Tensor | None = None) -> Iterator[Tensor]:
    """The tokens (B,) that `generate` puts together, one step at a time."""
    if options.guessing:
        yield from _columns(model, ids, options, mask)
        return
    ends = torch.tensor(ends_of(model.config, options), device=ids.device, dtype=torch.long)
    pad = pad_of(model.config, options)
    choose = Chooser(ids.size(0), options, Recorder())
    with _evaluating(model, options), Session(model, ids, mask, options.max_new_tokens, options.start_id) as session:
        adjust = adjuster(model, session, options)
        logits, new = session.logits, torch.empty(ids.size(0), 0, dtype=torch.long, device=ids.device)
        finished = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        for count in range(1, options.max_new_tokens + 1):
            token = torch.where(finished, pad, choose(adjust(logits.float(), new)))
            yield token
            finished = finished | torch.isin(token, ends)
            if count == options.max_new_tokens or (len(ends) and bool(finished.all())):
                return
            new = torch.cat([new, token[:, None]], 1)
            logits = session.step(token)


def _columns(model: Model, ids: Tensor, options: Options, mask: Tensor | None) -> Iterator[Tensor]:
    """What guesses bring, a token of every row at a time: a column is given out once all rows are that far."""
    pad, ends = pad_of(model.config, options), ends_of(model.config, options)
    rows: list[list[int]] = [[] for _ in ids]
    given = 0
    with _evaluating(model, options), _evaluating(options.draft or model, options):
        for new in speculate(model, ids, mask, options):
            for row, more in zip(rows, new, strict=True):
                row += more
            over = [row[-1] in ends or len(row) == options.max_new_tokens for row in rows]
            lengths = [len(row) for row in rows]
            ready = max(lengths) if all(over) else min(n for n, done in zip(lengths, over, strict=True) if not done)
            for place in range(given, ready):
                yield torch.tensor([row[place] if place < len(row) else pad for row in rows], device=ids.device)
            given = max(given, ready)


@contextmanager
def _evaluating(model: Model, options: Options) -> Iterator[None]:
    """No dropout in an answer."""
    was_training = model.training
    model.eval()
    try:
        keep = not was_training  # a model in training has other weights next time
        with packed(model, keep=keep), compiled(model, options.compile):
            yield
    finally:
        model.train(was_training)
