"""What a model reads and what it should say, for one example: small pure functions from ids to arrays.

Each runs for every example of every epoch, so the work is done by whole arrays. `rng` is the caller's, which makes an
example a function of its seed. What comes out, int64 except for pixels:

    encoder-decoder  source (S,), target (T,), labels (T,)   target goes into the decoder, labels should come out of it
    decoder          ids (T,), labels (T,)
    encoder          ids (T,), perhaps token_types (T,), labels (T,), (2,) or ()
    image            pixels (C, H, W) uint8, labels ()

A label of IGNORE has no loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

IGNORE = -100

Ids = NDArray[np.int64]
Example = dict[str, NDArray[Any]]


def sequence_to_sequence(source: ArrayLike, target: ArrayLike, *, start: int, eos: int, max_length: int) -> Example:
    """A source with its special tokens, and a target without any.

    A target that is too long ends with its true next token as the last label, not with an `eos` that is not there.
    """
    tokens = _ids(target)
    return {
        "source": _cut(_ids(source), max_length),
        "target": np.concatenate(([start], tokens))[:max_length],
        "labels": np.concatenate((tokens, [eos]))[:max_length],
    }


def causal(ids: ArrayLike, *, loss_from: int = 0) -> Example:
    """Every token from the ones before it. `loss_from` is the place of the first token to learn: a prompt's length."""
    tokens = _ids(ids)
    labels = tokens[1:].copy()
    labels[: max(0, loss_from - 1)] = IGNORE
    return {"ids": tokens[:-1], "labels": labels}


def learned(ids: ArrayLike, learn: ArrayLike, *, max_length: int) -> Example:
    """A text of which only some tokens are learned, those where `learn` is not 0: the answers in a conversation."""
    tokens, wanted = _ids(ids)[: max_length + 1], _ids(learn)[1 : max_length + 1]
    return {"ids": tokens[:-1], "labels": np.where(wanted != 0, tokens[1:], IGNORE)}


def masked(
    ids: ArrayLike,
    rng: Generator,
    *,
    mask_id: int,
    vocab_size: int,
    special: NDArray[np.bool_],
    probability: float = 0.15,
    word_starts: NDArray[np.bool_] | None = None,
) -> Example:
    """BERT's: each ordinary token is chosen with `probability`, and at least one is.

    Of those chosen 80% become `mask_id`, 10% a random ordinary token and 10% stay; all are to be predicted. `special`
    and `word_starts` say of each id whether it is a special token, and whether it begins a word. With `word_starts`
    whole words are chosen; what happens to a chosen piece is still drawn for each piece, as in BERT's own code.
    """
    tokens = _ids(ids)
    ordinary = ~special[tokens]
    chosen = _chosen(tokens, ordinary, rng, probability, word_starts)
    fate = rng.random(len(tokens))
    corrupted = np.where(chosen & (fate < 0.8), mask_id, tokens)
    places = np.flatnonzero(chosen & (fate >= 0.9))
    while len(places):  # drawn again where a special token came out
        corrupted[places] = rng.integers(vocab_size, size=len(places))
        places = places[special[corrupted[places]]]
    return {"ids": corrupted, "labels": np.where(chosen, tokens, IGNORE)}


def span_corruption(
    ids: ArrayLike,
    rng: Generator,
    *,
    sentinels: Sequence[int],
    start: int,
    eos: int,
    density: float = 0.15,
    mean_span: float = 3.0,
) -> Example:
    """T5's: spans are taken out, a sentinel stands for each, and the target tells what each sentinel hid.

    `ids` has no special tokens. Kept and hidden tokens are cut at random into equally many spans, which alternate,
    the first one kept. The source is the kept tokens with a sentinel for each hidden span, then `eos`. The labels are
    each sentinel with its span, one more sentinel (as in figure 2 of Raffel et al. 2020), then `eos`. There are at
    most as many spans as sentinels allow, and none in a text of one token.
    """
    if len(sentinels) < 2:
        raise ValueError(f"span corruption got {len(sentinels)} sentinels; one span needs two, one to end the target")
    if not 0.0 < density < 1.0 or mean_span < 1.0:
        raise ValueError(f"density is {density} and mean_span {mean_span}; expected between 0 and 1, and at least 1")
    tokens = _ids(ids)
    hidden = max(0, min(max(round(len(tokens) * density), 1), len(tokens) - 1))
    kept = len(tokens) - hidden
    spans = min(max(1, round(hidden / mean_span)), hidden, kept, len(sentinels) - 1)
    marks = np.asarray(sentinels[: spans + 1], dtype=np.int64)
    if not spans:
        source, labels = np.append(tokens, eos), np.append(marks, eos)
    else:
        lengths = np.stack((_partition(kept, spans, rng), _partition(hidden, spans, rng)), axis=1)  # (spans, 2)
        noise = np.repeat(np.tile([False, True], spans), lengths.ravel())
        first = lengths.ravel().cumsum()[0::2]  # where each hidden span begins
        source, gone = tokens.copy(), noise.copy()
        source[first], gone[first] = marks[:-1], False
        source = np.append(source[~gone], eos)
        labels = np.insert(tokens[noise], lengths[:, 1].cumsum() - lengths[:, 1], marks[:-1])
        labels = np.concatenate((labels, marks[-1:], [eos]))
    return {"source": source, "target": _shift(labels, start), "labels": labels}


def denoising(
    ids: ArrayLike,
    rng: Generator,
    *,
    mask_id: int,
    start: int,
    eos: int,
    bos: int | None = None,
    ratio: float = 0.3,
    mean_span: float = 3.0,
    full_stops: NDArray[np.bool_] | None = None,
) -> Example:
    """BART's: the whole text again, from one whose sentences are shuffled and whose spans are masked.

    `ids` has no special tokens. With `full_stops`, which says of each id whether it ends a sentence, the sentences are
    permuted first. Then spans with lengths from Poisson(`mean_span`) are drawn until they hide ⌈`ratio` × length⌉
    tokens, the last one shortened to hit that number; they are placed uniformly without overlap, and each becomes ONE
    `mask_id`. A span of length 0 hides nothing and so inserts a mask. The source is [bos] corrupted [eos], the labels
    [bos] original [eos].
    """
    if not 0.0 <= ratio <= 1.0 or mean_span <= 0.0:
        raise ValueError(f"ratio is {ratio} and mean_span {mean_span}; expected from 0 to 1, and above 0")
    tokens = _ids(ids)
    corrupted = tokens if full_stops is None else _permute_sentences(tokens, full_stops, rng)
    corrupted = _infill(corrupted, rng, mask_id, ratio, mean_span)
    first = _ids([] if bos is None else [bos])
    source, labels = np.concatenate((first, corrupted, [eos])), np.concatenate((first, tokens, [eos]))
    return {"source": source, "target": _shift(labels, start), "labels": labels}


def label_sequence(
    ids: ArrayLike, label: int, *, num_labels: int, token_types: ArrayLike | None = None, max_length: int
) -> Example:
    """One label for a text, or for a pair whose two parts `token_types` tells apart."""
    out = {"ids": _cut(_ids(ids), max_length), "labels": _label(label, num_labels)}
    return out if token_types is None else out | {"token_types": _cut(_ids(token_types), max_length)}


def label_tokens(
    ids: ArrayLike, word_ids: ArrayLike, tags: ArrayLike, *, max_length: int, num_labels: int | None = None
) -> Example:
    """A label for each word, on its first piece. `word_ids` is the word of each token, -1 for special tokens."""
    words, labels_of = _ids(word_ids), _ids(tags)
    if words.size and words.max() >= len(labels_of):
        raise ValueError(f"word {words.max() + 1} has no tag: there are {len(labels_of)}; expected one for each word")
    wrong = labels_of[(labels_of < 0) & (labels_of != IGNORE)]
    if num_labels is not None:
        wrong = np.append(wrong, labels_of[labels_of >= num_labels])
    if wrong.size:
        limit = "at least 0" if num_labels is None else f"from 0 to {num_labels - 1}"
        raise ValueError(f"a tag is {wrong[0]}; expected {limit}, or {IGNORE} for a word without one")
    first = (words >= 0) & (words != np.concatenate(([-1], words[:-1])))
    labels = np.full(len(words), IGNORE)
    labels[first] = labels_of[words[first]]
    return {"ids": _cut(_ids(ids), max_length), "labels": _cut(labels, max_length)}


def answer_span(
    ids: ArrayLike, token_types: ArrayLike, offsets: ArrayLike, start_char: int, end_char: int, *, max_length: int
) -> Example:
    """The first and the last token of the answer, characters `start_char` up to `end_char` of the context.

    The context is where `token_types` is 1; `offsets` (T, 2) are the characters of each token in its own text. An
    answer that is absent, or not wholly within the tokens kept, is (0, 0): the first token, as SQuAD 2 has it.
    """
    tokens, types, places = _ids(ids), _ids(token_types), _ids(offsets)
    context = (types == 1) & (places[:, 1] > places[:, 0])
    inside = np.flatnonzero(context & (places[:, 0] < end_char) & (places[:, 1] > start_char))
    labels = np.zeros(2, dtype=np.int64)
    if start_char < end_char and inside.size:
        whole = places[context, 0].min() <= start_char and end_char <= places[context, 1].max()
        # The final token is kept as well, but after a cut it does not follow the one before it.
        kept = len(tokens) <= max_length or inside[-1] < max_length - 1
        labels[:] = inside[[0, -1]] if whole and kept else 0
    return {"ids": _cut(tokens, max_length), "token_types": _cut(types, max_length), "labels": labels}


def label_image(
    pixels: NDArray[np.uint8],
    label: int,
    *,
    num_labels: int,
    flip: bool = False,
    crop: int = 0,
    rng: Generator | None = None,
) -> Example:
    """One label for an image, which may be mirrored half of the time and moved by up to `crop` pixels each way."""
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"an image is {pixels.dtype} {pixels.shape}; expected uint8 (channels, height, width)")
    if rng is None and (flip or crop):
        raise ValueError("a random flip or crop needs rng; give a numpy Generator, or set flip=False and crop=0")
    if rng is not None and crop:
        height, width = pixels.shape[1:]
        down, right = rng.integers(2 * crop + 1, size=2)
        padded = np.pad(pixels, ((0, 0), (crop, crop), (crop, crop)))
        pixels = padded[:, down : down + height, right : right + width]
    if rng is not None and flip and rng.random() < 0.5:
        pixels = pixels[:, :, ::-1]
    return {"pixels": np.ascontiguousarray(pixels), "labels": _label(label, num_labels)}


def _ids(values: ArrayLike) -> Ids:
    return np.asarray(values, dtype=np.int64)


def _cut(values: Ids, max_length: int) -> Ids:
    """At most `max_length` values, the last one kept: it is the token that ends a text."""
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    return values if len(values) <= max_length else np.append(values[: max_length - 1], values[-1])


def _shift(labels: Ids, start: int) -> Ids:
    return np.concatenate(([start], labels[:-1]))


def _label(label: int, num_labels: int) -> Ids:
    if not 0 <= label < num_labels or int(label) != label:
        raise ValueError(
            f"label {label} is not one of {num_labels}; expected a whole number from 0 to {num_labels - 1}"
        )
    return np.asarray(label, dtype=np.int64)


def _chosen(
    tokens: Ids,
    ordinary: NDArray[np.bool_],
    rng: Generator,
    probability: float,
    word_starts: NDArray[np.bool_] | None,
) -> NDArray[np.bool_]:
    """The tokens to predict. Without words, each token is a word of its own."""
    begins = np.ones(len(tokens), dtype=np.bool_)
    if word_starts is not None:
        # A special token stands alone, and so begins what follows it, even if that looks like the middle of a word.
        begins[1:] = word_starts[tokens[1:]] | ~ordinary[1:] | ~ordinary[:-1]
    word = begins.cumsum() - 1
    chosen = (rng.random(int(begins.sum())) < probability)[word] & ordinary
    if not chosen.any() and ordinary.any():
        chosen = word == rng.choice(word[begins & ordinary])
    return chosen


def _partition(items: int, parts: int, rng: Generator) -> Ids:
    """The sizes of `parts` non-empty parts of `items`, every way to cut them equally likely."""
    cuts = np.sort(rng.choice(items - 1, parts - 1, replace=False)) + 1 if parts > 1 else _ids([])
    ends = np.append(cuts, items)
    return ends - np.append(0, cuts)


def _permute_sentences(tokens: Ids, full_stops: NDArray[np.bool_], rng: Generator) -> Ids:
    """Sentences in random order; one ends after its last full stop ("..." is one end), and at the end of the text."""
    stops = full_stops[tokens]
    begins = np.concatenate(([False], stops[:-1] & ~stops[1:]))[: len(tokens)]
    sentence = begins.cumsum()
    rank = rng.permutation(int(begins.sum()) + 1)
    return tokens[np.argsort(rank[sentence], kind="stable")]


def _infill(tokens: Ids, rng: Generator, mask_id: int, ratio: float, mean_span: float) -> Ids:
    hidden = math.ceil(len(tokens) * ratio - 1e-9)
    if not hidden:
        return tokens
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < hidden:
        lengths = np.append(lengths, rng.poisson(mean_span, size=8 + int(hidden / mean_span)))
    total = lengths.cumsum()
    last = int(np.searchsorted(total, hidden))
    lengths = lengths[: last + 1]
    lengths[-1] -= total[last] - hidden
    # The result is a row of kept tokens and spans; which of its items are spans is drawn uniformly.
    width = np.ones(len(tokens) - hidden + len(lengths), dtype=np.int64)
    spans = rng.choice(len(width), len(lengths), replace=False)
    width[spans] = lengths
    begin = width.cumsum() - width
    corrupted = tokens[np.minimum(begin, len(tokens) - 1)]
    corrupted[spans] = mask_id
    return corrupted
