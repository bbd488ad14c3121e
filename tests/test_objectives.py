"""The training objectives against their definitions: what was hidden can be put back, and as much is hidden as said."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from transformers.models.bart.modeling_bart import shift_tokens_right

from sublayer.data.objectives import (
    IGNORE,
    answer_span,
    causal,
    denoising,
    label_image,
    label_sequence,
    label_tokens,
    masked,
    sequence_to_sequence,
    span_corruption,
)

VOCAB, SPECIALS, MASK, START, EOS, BOS = 200, 10, 4, 0, 1, 2
SPECIAL = np.arange(VOCAB) < SPECIALS
SENTINELS = tuple(range(VOCAB, VOCAB + 100))

seeds = st.integers(0, 2**32 - 1)
ordinary_ids = st.lists(st.integers(SPECIALS, VOCAB - 1), max_size=80)


def random_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def likely(count: int, trials: int, probability: float) -> bool:
    """Whether the exact binomial gives a count this far out, on its side, more than one chance in 10⁷."""

    def chance(k: int) -> float:
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        return math.exp(ways + k * math.log(probability) + (trials - k) * math.log1p(-probability))

    tail = range(count, trials + 1) if count > trials * probability else range(count + 1)
    return sum(chance(k) for k in tail) > 1e-7


def mask_tokens(ids: Any, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"mask_id": MASK, "vocab_size": VOCAB, "special": SPECIAL} | changes
    return masked(ids, random_of(seed), **settings)


def corrupt(ids: Any, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"sentinels": SENTINELS, "start": START, "eos": EOS} | changes
    return span_corruption(ids, random_of(seed), **settings)


def denoise(ids: Any, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"mask_id": MASK, "start": START, "eos": EOS, "bos": BOS} | changes
    return denoising(ids, random_of(seed), **settings)


def shifted(labels: np.ndarray, start: int) -> list[int]:
    """The decoder's input as transformers makes it of the labels."""
    return shift_tokens_right(torch.tensor(labels, device="cpu")[None], 3, start)[0].tolist()


# Sequence to sequence, and causal


@given(target=ordinary_ids, max_length=st.integers(1, 90))
def test_target_and_labels_are_aligned(target: list[int], max_length: int) -> None:
    out = sequence_to_sequence([7], np.array(target, np.uint16), start=START, eos=EOS, max_length=max_length)
    whole = [START, *target, EOS]
    assert out["target"].tolist() == whole[:-1][:max_length]
    assert out["labels"].tolist() == whole[1:][:max_length]
    assert all(array.dtype == np.int64 for array in out.values())


def test_long_source_keeps_its_final_token() -> None:
    settings: dict[str, Any] = {"start": START, "eos": EOS}
    source = sequence_to_sequence([5, 6, 7, 8, EOS], [9], max_length=3, **settings)["source"]
    assert source.tolist() == [5, 6, EOS]
    assert sequence_to_sequence([5, 6, EOS], [9], max_length=3, **settings)["source"].tolist() == [5, 6, EOS]
    with pytest.raises(ValueError, match="max_length is 0"):
        sequence_to_sequence([5], [9], max_length=0, **settings)


@given(ids=ordinary_ids.filter(len), prompt=st.integers(0, 90))
def test_causal_learns_exactly_the_tokens_after_the_prompt(ids: list[int], prompt: int) -> None:
    given_ids = np.array(ids)
    out = causal(given_ids, loss_from=prompt)
    assert out["ids"].tolist() == ids[:-1]
    learnt = [place + 1 for place, label in enumerate(out["labels"]) if label != IGNORE]
    assert learnt == list(range(max(1, prompt), len(ids)))
    assert [out["labels"][place - 1] for place in learnt] == [ids[place] for place in learnt]
    assert given_ids.tolist() == ids


# Masked


@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=60), seed=seeds, probability=st.floats(0.0, 1.0))
def test_masked_labels_recover_the_text(ids: list[int], seed: int, probability: float) -> None:
    array = np.array(ids, np.int64)
    out = mask_tokens(array, seed, probability=probability)
    chosen = out["labels"] != IGNORE
    assert np.array_equal(np.where(chosen, out["labels"], out["ids"]), array)
    assert not chosen[SPECIAL[array]].any()
    assert chosen.any() == (~SPECIAL[array]).any()
    changed = out["ids"][chosen]
    assert not SPECIAL[changed[changed != MASK]].any()
    again = mask_tokens(array, seed, probability=probability)
    assert all(np.array_equal(out[key], again[key]) for key in out)


def test_masked_in_the_proportions_of_bert() -> None:
    ids = random_of(1).integers(0, VOCAB, 40_000)
    maskable = int((~SPECIAL[ids]).sum())
    out = mask_tokens(ids)
    chosen = out["labels"] != IGNORE
    number = int(chosen.sum())
    hidden = int((out["ids"][chosen] == MASK).sum())
    same = int((out["ids"] == ids)[chosen].sum())
    by_chance = 1 / (VOCAB - SPECIALS)  # a random token may be the one that was there
    assert likely(number, maskable, 0.15)
    assert likely(hidden, number, 0.8)
    assert likely(same, number, 0.1 + 0.1 * by_chance)
    assert likely(number - hidden - same, number, 0.1 * (1 - by_chance))
    changed = out["ids"][chosen & (out["ids"] != MASK) & (out["ids"] != ids)]
    assert len(set(changed.tolist())) > 0.9 * (VOCAB - SPECIALS)  # from all over the vocabulary
    assert not SPECIAL[changed].any()


def test_the_one_token_that_is_always_masked_is_any_of_them() -> None:
    labels = [mask_tokens([11, 0, 12, 13], seed, probability=0.0)["labels"] for seed in range(3000)]
    chosen = [int((row != IGNORE).argmax()) for row in labels]
    assert all(likely(chosen.count(place), 3000, 1 / 3) for place in (0, 2, 3))


def test_masked_chooses_like_transformers() -> None:
    """Theirs may draw special tokens as replacements; that aside, counts of each kind must agree."""
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w9"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token=f"w{MASK}", pad_token="w3")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, return_tensors="np", seed=0)
    ids = random_of(2).integers(0, VOCAB, 40_000)
    row = {"input_ids": ids.tolist(), "special_tokens_mask": SPECIAL[ids].astype(int).tolist()}
    theirs = {"ids" if key == "input_ids" else key: value[0] for key, value in collator([row]).items()}

    def counts(out: dict[str, np.ndarray]) -> np.ndarray:
        chosen = out["labels"] != IGNORE
        hidden, same = chosen & (out["ids"] == MASK), chosen & (out["ids"] == ids)
        return np.array([chosen.sum(), hidden.sum(), same.sum(), (chosen & ~hidden & ~same).sum()])

    ours, other = counts(mask_tokens(ids)), counts(theirs)
    assert (np.abs(ours - other) < 5 * np.sqrt(ours + other)).all()
    assert (theirs["ids"][theirs["labels"] == IGNORE] == ids[theirs["labels"] == IGNORE]).all()


@given(ids=st.lists(st.integers(0, 3 * SPECIALS), max_size=30), seed=seeds, probability=st.floats(0.0, 1.0))
@hypothesis.example(ids=[0, SPECIALS], seed=0, probability=0.0)  # a special token, then the middle of a word
def test_whole_words_are_never_split(ids: list[int], seed: int, probability: float) -> None:
    starts = np.arange(VOCAB) % 3 == 0  # two thirds of the pieces continue a word
    out = mask_tokens(np.array(ids, np.int64), seed, probability=probability, word_starts=starts)
    words: list[list[int]] = []
    for place, token in enumerate(ids):
        if SPECIAL[token]:
            words.append([])  # what follows is a new word
        elif starts[token] or not words or not words[-1]:
            words.append([place])
        else:
            words[-1].append(place)
    chosen = out["labels"] != IGNORE
    assert all(chosen[word].all() or not chosen[word].any() for word in words if word)
    assert chosen.any() == any(words)


def test_whole_words_are_chosen_as_often_as_tokens() -> None:
    starts = np.arange(VOCAB) % 2 == 0
    ids = np.tile([20, 21, 23], 8000)  # words of three pieces
    out = mask_tokens(ids, word_starts=starts)
    chosen = out["labels"] != IGNORE
    assert likely(int(chosen[::3].sum()), 8000, 0.15)
    mixed = (out["ids"] == MASK).reshape(-1, 3)[chosen[::3]]
    assert (mixed.any(1) & ~mixed.all(1)).any()  # the pieces of a word have a fate each


# Span corruption


def put_back(source: list[int], labels: list[int]) -> list[int]:
    """The text: each sentinel of the source replaced by what the labels say after the same sentinel."""
    assert source[-1] == EOS == labels[-1]
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token >= VOCAB:
            spans[token] = current = []
        else:
            current.append(token)
    order = [token for token in source if token >= VOCAB]
    assert list(spans) == [*order, SENTINELS[len(order)]] and not current  # the last sentinel hides nothing
    assert all(spans[token] for token in order)
    return list(itertools.chain.from_iterable(spans[t] if t >= VOCAB else [t] for t in source[:-1]))


@given(ids=ordinary_ids, seed=seeds, density=st.floats(0.01, 0.99), mean_span=st.floats(1.0, 9.0))
@hypothesis.example(ids=[11, 12, 13, 14, 15], seed=0, density=0.8, mean_span=1.0)  # fewer kept than hidden
def test_span_corruption_can_be_undone(ids: list[int], seed: int, density: float, mean_span: float) -> None:
    out = corrupt(ids, seed, density=density, mean_span=mean_span)
    source, labels = out["source"].tolist(), out["labels"].tolist()
    assert put_back(source, labels) == ids
    assert out["target"].tolist() == shifted(out["labels"], START)
    assert all(array.dtype == np.int64 for array in out.values())
    if len(ids) > 1:
        hidden = sum(token < VOCAB for token in labels) - 1
        assert hidden == min(max(round(len(ids) * density), 1), len(ids) - 1)
        assert source[0] < VOCAB <= source[-2]  # as T5 draws them: kept first, hidden last
    again = corrupt(ids, seed, density=density, mean_span=mean_span)
    assert all(np.array_equal(out[key], again[key]) for key in out)


@pytest.mark.parametrize("length", [2, 3, 10, 64, 512, 568])
@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 3.0), (0.15, 8.0)])
def test_span_corruption_hides_as_much_as_t5(length: int, density: float, mean_span: float) -> None:
    out = corrupt(np.arange(length) % 50 + SPECIALS, density=density, mean_span=mean_span)
    hidden = min(max(round(length * density), 1), length - 1)
    spans = max(1, round(hidden / mean_span))
    assert len(out["source"]) == length - hidden + spans + 1
    assert len(out["labels"]) == hidden + spans + 2


def test_spans_are_cut_uniformly() -> None:
    """Two spans of five hidden tokens: the four ways to cut them are equally likely."""
    draws = 4000
    ids = np.arange(10) + SPECIALS
    labels = [corrupt(ids, seed, density=0.5, mean_span=2.5)["labels"] for seed in range(draws)]
    first = [int((row == SENTINELS[1]).argmax()) for row in labels]
    assert set(first) == {2, 3, 4, 5}
    assert all(likely(first.count(place), draws, 0.25) for place in (2, 3, 4, 5))


def test_too_few_sentinels_give_fewer_spans() -> None:
    ids = list(np.arange(100) % 50 + SPECIALS)
    out = corrupt(ids, density=0.5, sentinels=SENTINELS[:4])
    assert sum(out["source"] >= VOCAB) == 3
    assert put_back(out["source"].tolist(), out["labels"].tolist()) == ids
    with pytest.raises(ValueError, match="got 1 sentinels"):
        corrupt(ids, sentinels=SENTINELS[:1])
    with pytest.raises(ValueError, match=r"density is 1\.5"):
        corrupt(ids, density=1.5)


# Denoising


@given(length=st.integers(0, 80), seed=seeds, ratio=st.floats(0.0, 1.0), mean_span=st.floats(0.5, 6.0))
def test_infilling_keeps_the_rest_in_order(length: int, seed: int, ratio: float, mean_span: float) -> None:
    """All tokens differ, so the source tells what stands under every mask, and putting it back gives the text."""
    ids = np.arange(length) + SPECIALS
    out = denoise(ids, seed, ratio=ratio, mean_span=mean_span)
    assert out["labels"].tolist() == [BOS, *ids, EOS]
    assert out["target"].tolist() == shifted(out["labels"], START)
    source = out["source"].tolist()
    assert (source[0], source[-1]) == (BOS, EOS)
    kept = [token for token in source[1:-1] if token != MASK]
    assert length - len(kept) == math.ceil(length * ratio - 1e-9)
    restored: list[int] = []
    for key, run in itertools.groupby(source[1:-1], lambda token: token == MASK):
        tokens = list(run)
        if key:
            after = [t for t in kept if t >= SPECIALS + len(restored)]
            tokens = list(range(SPECIALS + len(restored), after[0] if after else SPECIALS + length))
        restored += tokens
    assert restored == ids.tolist()  # a hole without a mask, or tokens out of order, would show here
    again = denoise(ids, seed, ratio=ratio, mean_span=mean_span)
    assert all(np.array_equal(out[key], again[key]) for key in out)


@pytest.mark.parametrize("mean_span", [0.05, 1.0, 3.0])
def test_infilling_draws_spans_from_a_poisson(mean_span: float) -> None:
    """A renewal process: about hidden / mean spans, with a variance of hidden · mean / mean³ (Poisson: σ² = mean)."""
    length = 30_000
    out = denoise(np.arange(length) + SPECIALS, mean_span=mean_span)
    hidden, masks = 0.3 * length, int((out["source"] == MASK).sum())
    assert abs(masks - hidden / mean_span) < 5 * math.sqrt(hidden) / mean_span + 1 + 1 / mean_span


def test_a_short_last_span_may_be_anywhere() -> None:
    """One hidden token of three, mostly by one span cut to fit: each of the three must be hidden about as often."""
    hidden = []
    for seed in range(3000):
        source = denoise([11, 12, 13], seed, mean_span=50.0)["source"].tolist()
        hidden += [token for token in (11, 12, 13) if token not in source]
    assert len(hidden) == 3000 and all(likely(hidden.count(token), 3000, 1 / 3) for token in (11, 12, 13))


@given(stops=st.lists(st.booleans(), max_size=60), seed=seeds)
def test_sentences_are_permuted_whole(stops: list[bool], seed: int) -> None:
    """All tokens differ, so a sentence is known by its first one."""
    ids = list(range(SPECIALS, SPECIALS + len(stops)))
    table = np.zeros(VOCAB, dtype=bool)
    table[ids] = stops
    sentences: dict[int, list[int]] = {}
    for token in ids:
        if token == SPECIALS or (table[token - 1] and not table[token]):
            sentences[token] = current = []
        current.append(token)
    source = denoise(ids, seed, ratio=0.0, full_stops=table)["source"].tolist()[1:-1]
    while source:
        sentence = sentences.pop(source[0])
        assert source[: len(sentence)] == sentence
        source = source[len(sentence) :]
    assert not sentences


def test_spans_are_the_same_from_either_end() -> None:
    """The last span drawn is often shortened, and must not always stand last."""
    difference = []
    for seed in range(2000):
        source = denoise(np.arange(40) + SPECIALS, seed, mean_span=8.0)["source"].tolist()
        kept = np.array([SPECIALS - 1, *(token for token in source[1:-1] if token != MASK), SPECIALS + 40])
        runs = np.diff(kept)[np.diff(kept) > 1]
        difference.append(float(runs[0] - runs[-1]))
    assert abs(np.mean(difference)) < 5 * np.std(difference) / math.sqrt(len(difference))


def test_sentences_come_in_every_order() -> None:
    table = np.arange(VOCAB) == 50
    ids = [11, 50, 12, 50, 50, 13]
    draws = [tuple(denoise(ids, seed, ratio=0.0, full_stops=table)["source"].tolist()) for seed in range(1200)]
    orders = itertools.permutations(((11, 50), (12, 50, 50), (13,)))
    expected = {(BOS, *itertools.chain(*order), EOS) for order in orders}
    assert set(draws) == expected
    assert all(likely(draws.count(order), 1200, 1 / 6) for order in expected)


def test_denoising_without_a_first_token() -> None:
    out = denoise([11, 12], bos=None, ratio=0.0)
    assert [out[key].tolist() for key in ("source", "target", "labels")] == [
        [11, 12, EOS],
        [START, 11, 12],
        [11, 12, EOS],
    ]
    with pytest.raises(ValueError, match="mean_span 0"):
        denoise([11, 12], mean_span=0.0)


# Labels


def test_label_sequence() -> None:
    out = label_sequence([2, 5, 6, 3, 7, 3], 4, num_labels=5, token_types=[0, 0, 0, 0, 1, 1], max_length=5)
    assert out["ids"].tolist() == [2, 5, 6, 3, 3] and out["token_types"].tolist() == [0, 0, 0, 0, 1]
    assert out["labels"].shape == () and out["labels"].dtype == np.int64 and out["labels"] == 4
    assert "token_types" not in label_sequence([2, 3], 0, num_labels=5, max_length=5)
    for wrong in (-1, 5, 0.5, IGNORE):
        with pytest.raises(ValueError, match=f"label {wrong} is not one of 5") as caught:
            label_sequence([2, 3], wrong, num_labels=5, max_length=5)
        assert "\n" not in str(caught.value)


@given(pieces=st.lists(st.integers(1, 4), max_size=15), max_length=st.integers(1, 50))
def test_label_tokens_are_on_first_pieces(pieces: list[int], max_length: int) -> None:
    word_ids = [-1, *itertools.chain.from_iterable([word] * count for word, count in enumerate(pieces)), -1]
    tags = [100 + word for word in range(len(pieces))]
    out = label_tokens(range(len(word_ids)), word_ids, tags, max_length=max_length)
    assert len(out["ids"]) == len(out["labels"]) == min(max_length, len(word_ids))
    for place, label in zip(out["ids"], out["labels"], strict=True):  # the ids are the places before the cut
        word = word_ids[place]
        assert label == (tags[word] if word >= 0 and word_ids.index(word) == place else IGNORE)


def test_label_tokens_refuses_wrong_tags() -> None:
    settings: dict[str, Any] = {"max_length": 9, "num_labels": 3}
    assert label_tokens([5, 6], [0, 1], [2, IGNORE], **settings)["labels"].tolist() == [2, IGNORE]
    for tags, message in (([0], "word 2 has no tag: there are 1"), ([0, 3], "a tag is 3"), ([-1, 0], "a tag is -1")):
        with pytest.raises(ValueError, match=message) as caught:
            label_tokens([5, 6], [0, 1], tags, **settings)
        assert "\n" not in str(caught.value)


CONTEXT = "the unseen cat  sat on unsat mats, and the dog ran"


def squad_encoding() -> tokenizers.Encoding:
    words = "[UNK] [CLS] [SEP] the un ##seen cat sat ##sat on mat ##s , and dog ran who ?"
    vocab = {word: place for place, word in enumerate(words.split())}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend.encode("who sat on the mat?", CONTEXT)


@pytest.mark.parametrize("length", [1, 3, 11])
def test_answer_span_is_the_tokens_that_touch_the_answer(length: int) -> None:
    encoding = squad_encoding()
    ids, types, offsets = encoding.ids, encoding.type_ids, np.array(encoding.offsets)
    for start, max_length in itertools.product(range(len(CONTEXT) - length + 1), range(2, len(ids) + 2)):
        answer = set(range(start, start + length))
        touching = [place for place in range(len(ids)) if types[place] == 1 and answer & set(range(*offsets[place]))]
        out = answer_span(ids, types, offsets, start, start + length, max_length=max_length)
        room = min(max_length, len(ids)) - 1  # the last place is the separator's
        expected = [touching[0], touching[-1]] if touching and touching[-1] < room else [0, 0]
        assert out["labels"].tolist() == expected
        assert out["ids"].tolist() == [*ids[:room], ids[-1]] and out["token_types"].tolist() == [*types[:room], 1]


def test_answer_that_is_absent_or_partly_outside_the_window_is_the_first_token() -> None:
    encoding = squad_encoding()
    offsets = np.array(encoding.offsets)
    settings: dict[str, Any] = {"max_length": 99}
    assert answer_span(encoding.ids, encoding.type_ids, offsets, 0, 0, **settings)["labels"].tolist() == [0, 0]
    assert answer_span(encoding.ids, encoding.type_ids, offsets, -1, -1, **settings)["labels"].tolist() == [0, 0]
    window = np.array(encoding.type_ids) == 0
    window[-6:] = True  # the context's last words only
    view = [np.array(encoding.ids)[window], np.array(encoding.type_ids)[window], offsets[window]]
    begin = offsets[-6, 0]
    inside = answer_span(*view, begin, begin + 1, **settings)["labels"].tolist()
    assert inside == [int(window[:-6].sum())] * 2
    assert answer_span(*view, begin - 5, begin + 1, **settings)["labels"].tolist() == [0, 0]


# Images


def test_label_image_as_it_is() -> None:
    pixels = random_of(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    out = label_image(pixels, 1, num_labels=2)
    assert np.array_equal(out["pixels"], pixels) and out["labels"] == 1 and out["labels"].shape == ()
    for wrong, message in (
        (lambda: label_image(pixels, 2, num_labels=2), "label 2 is not one of 2"),
        (lambda: label_image(pixels[0], 1, num_labels=2), r"expected uint8 \(channels, height, width\)"),
        (lambda: label_image(pixels / 255, 1, num_labels=2), "an image is float64"),
        (lambda: label_image(pixels, 1, num_labels=2, flip=True), "needs rng"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_image_is_mirrored_and_moved_to_every_place_equally() -> None:
    pixels = random_of(0).integers(1, 256, (3, 5, 4), dtype=np.uint8)
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    views = {}
    for down, right in itertools.product(range(3), repeat=2):
        view = padded[:, down : down + 5, right : right + 4]
        views |= {view.tobytes(): (down, right, 0), view[:, :, ::-1].tobytes(): (down, right, 1)}
    rng, draws = random_of(1), 3600
    outs = [label_image(pixels, 0, num_labels=1, flip=True, crop=1, rng=rng)["pixels"] for _ in range(draws)]
    found = [views[out.tobytes()] for out in outs]
    assert all(likely(found.count(view), draws, 1 / 18) for view in views.values())
    assert likely(sum(mirrored for _, _, mirrored in found), draws, 1 / 2)
    assert torch.from_numpy(outs[0]).shape == (3, 5, 4)  # which a mirrored view would not allow
