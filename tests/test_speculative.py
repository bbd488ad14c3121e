"""Guesses change no answer; sessions share what prompts share, read long prompts in pieces, and use memory again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sublayer
from sublayer.generation import sampling
from sublayer.generation import session as sessions
from sublayer.generation.generate import make_options
from sublayer.generation.session import Session
from sublayer.generation.speculative import Lookup, speculate
from support import random_ids, small

PRESETS = ["gpt2", "llama-2-7b", "mistral-7b", "t5-small", "bart-base", "original-base"]
SAMPLED = dict(temperature=1.3, top_k=20, seed=11)


def lively(name: str, seed: int = 1, **changes) -> sublayer.models.Model:
    """A model with random weights and answers that vary and end."""
    torch.manual_seed(seed)
    model = sublayer.build(small(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


def ragged(model, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(rows, 8, seed=5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 5:] = False
    return ids, mask


@pytest.mark.parametrize("options", [{}, SAMPLED, dict(repetition_penalty=1.5), dict(no_repeat_ngrams=2)], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_guesses_change_no_answer(preset, options):
    """Neither a look-up, nor a draft that guesses badly, nor one that guesses well (the model itself)."""
    model, other = lively(preset), lively(preset, seed=2, d_ff=40)
    ids, mask = ragged(model)
    options = dict(mask=mask, max_new_tokens=20, eos_id=2, pad_id=0, **options)
    plain = sublayer.generate(model, ids, **options)
    for guesser in (dict(lookup=True), dict(draft=other), dict(draft=model), dict(draft=other, guesses=1)):
        assert torch.equal(sublayer.generate(model, ids, **options, **guesser), plain), guesser


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_is_right_saves_steps(options):
    """Each round brings all guesses and one more: what is drawn is drawn alike."""
    model = lively("llama-2-7b")
    options = make_options(max_new_tokens=19, draft=model, guesses=5, eos_id=(), **options)
    with torch.inference_mode():
        rounds = [len(new[0]) for new in speculate(model, random_ids(1, 6), None, options)]
    assert rounds == [1, 6, 6, 6]


def test_a_lookup_finds_what_came_before():
    look = Lookup([[5, 6, 7, 8, 9, 1, 6, 7]])
    assert look([[]], [3]) == [[8, 9, 1]]
    assert look([[3, 9, 1]], [2]) == [[6, 7]]  # two tokens alike, three of them not
    assert look([[3, 9, 1, 4]], [2]) == [[]]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 5))
def test_a_lookup_guesses_what_followed_the_longest_run(text, count):
    guess = Lookup([text])([[]], [count])[0]
    expected = []
    for size in (2, 3):  # the longer one wins, and of several places the last
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                expected = text[end : end + count]
        if size == 2:
            shorter, expected = expected, []
    assert guess == (expected or shorter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lookup=True, num_beams=2), "guesses for one answer, not for beams"),
        (dict(lookup=True, draft="model"), "choose one"),
        (dict(draft="other"), "the draft's vocab_size is"),
        (dict(lookup=True, guesses=0), "guesses is 0; it must be at least 1"),
    ],
)
def test_refusals(options, message):
    model = lively("gpt2")
    models = {"model": model, "other": lively("gpt2", vocab_size=31)}
    options = {key: models.get(value, value) if key == "draft" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message):
        sublayer.generate(model, random_ids(1, 4), max_new_tokens=4, **options)


@pytest.mark.parametrize("preset", ["gpt2", "llama-2-7b", "mistral-7b"])
def test_prompts_in_pieces_and_with_a_common_beginning(preset, monkeypatch):
    """What all rows begin with is read once; nothing is read more than a few tokens at a time."""
    model = lively(preset)
    ids = random_ids(3, 20, seed=4)
    ids[:, :12] = ids[:1, :12]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 15:] = False
    left_ids, left_mask = ids.clone(), mask.clone()
    left_ids[0, 5:], left_mask[0] = ids[0, :15], torch.arange(20) >= 5
    options = dict(max_new_tokens=9, eos_id=(), pad_id=0)
    plain = [sublayer.generate(model, row[real][None], **options)[0] for row, real in zip(ids, mask, strict=True)]
    monkeypatch.setattr(sessions, "PIECE", 5)
    monkeypatch.setattr(sessions, "SHARED", 4)
    sessions._spare.clear()
    read = []
    features = model.features
    monkeypatch.setattr(model, "features", lambda ids, **rest: read.append(tuple(ids.shape)) or features(ids, **rest))
    for tokens, real in ((ids, mask), (left_ids, left_mask)):
        read.clear()
        assert torch.equal(sublayer.generate(model, tokens, mask=real, **options), torch.stack(plain))
        assert read[:5] == [(1, 5), (1, 5), (1, 2), (3, 5), (3, 3)]


def test_a_window_bounds_the_memory():
    model = lively("mistral-7b")
    window = model.config.window
    bounded, whole = model.make_cache(2, 40, chunk=4), model.make_cache(2, 40)
    assert bounded.bytes * 41 == whole.bytes * (window + 4)
    ids = random_ids(2, 40)
    parts = [model(part, cache=bounded) for part in ids.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a step of 5 tokens; this cache was made for steps of at most 4"):
        model(random_ids(2, 5), cache=bounded)


def test_memory_is_used_again():
    """The next call takes the cache of the last, whatever was in it; two at once have each their own."""
    model = lively("gpt2", d_model=128, max_positions=64)
    long, short = random_ids(2, 12, seed=1), random_ids(1, 5, seed=2)
    expected = sublayer.generate(model, short, max_new_tokens=8)
    sessions._spare.clear()
    sublayer.generate(model, long, max_new_tokens=20)
    cache = sessions._spare[model].cache
    assert torch.equal(sublayer.generate(model, short, max_new_tokens=8), expected)
    assert sessions._spare[model].cache is cache
    with torch.inference_mode(), Session(model, long, None, 4) as one, Session(model, long, None, 4) as other:
        assert one.cache.keys[0].data_ptr() != other.cache.keys[0].data_ptr()
        torch.testing.assert_close(one.logits, other.logits)


def test_memory_that_is_larger_than_the_model_is_not_kept():
    model = lively("llama-2-7b")
    sublayer.generate(model, random_ids(64, 12), max_new_tokens=30)
    assert model not in sessions._spare


@pytest.mark.parametrize("guesser", [{}, dict(lookup=True), dict(draft=True)], ids=["plain", "lookup", "draft"])
@pytest.mark.parametrize("preset", ["gpt2", "t5-small"])
def test_answers_are_drawn_with_their_probabilities(preset, guesser):
    """Pearson's chi-square test over all pairs of tokens, against their probabilities in a pass without a cache."""
    model = lively(preset, vocab_size=12)
    options = dict(temperature=1.4, top_k=4)
    ids, rows = torch.tensor([[3, 4, 5, 3, 4]]), 3000
    expected = torch.zeros(12, 12)
    with torch.inference_mode():
        for first, chance in enumerate(_chances(model, ids, [], options)):
            if chance:
                expected[first] = chance * _chances(model, ids, [first], options)
    torch.manual_seed(5)
    more = guesser if "draft" not in guesser else dict(draft=lively(preset, seed=2, vocab_size=12))
    drawn = sublayer.generate(model, ids.expand(rows, -1), max_new_tokens=2, eos_id=(), pad_id=0, **options, **more)
    counts = torch.zeros(12, 12).index_put_((drawn[:, 0], drawn[:, 1]), torch.ones(rows), accumulate=True)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - rows * expected)[possible] ** 2 / (rows * expected[possible])).sum()
    freedom = torch.tensor(float(possible.sum() - 1))
    assert float(torch.special.gammaincc(freedom / 2, statistic / 2)) > 0.001


def _chances(model, ids: torch.Tensor, said: list[int], options: dict) -> torch.Tensor:
    """Of each next token: a softmax over the likeliest few."""
    new = torch.tensor([said], dtype=torch.long)
    if model.config.shape == "decoder":
        logits = model(torch.cat([ids, new], 1))[0, -1]
    else:
        logits = model(ids, torch.cat([torch.tensor([[model.config.start_id]]), new], 1))[0, -1]
    best = logits.topk(options["top_k"])
    return torch.zeros(12).scatter(0, best.indices, (best.values / options["temperature"]).softmax(-1))


def test_draws_hardly_depend_on_rounding():
    """What a batch of another size changes in the logits, in its last digits, changes next to no draw."""
    torch.manual_seed(0)
    logits = torch.randn(400, 50_000) * 2
    noisy = logits * (1 + 1e-6 * torch.randn_like(logits))
    drawn = [
        sampling.pick(scores, sampling.numbers([torch.Generator().manual_seed(seed) for seed in range(400)]))
        for scores in (logits, noisy)
    ]
    assert torch.equal(*drawn)


@given(st.integers(0, 2**62 - 1), st.lists(st.integers(0, 200_000), min_size=1, max_size=5, unique=True))
def test_numbers_are_those_of_splitmix64(key, ids):
    """Written down with whole numbers that do not overflow."""

    def expected(number: int) -> float:
        bits = (key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return (((bits ^ bits >> 31) >> 12) + 0.5) / 2**52

    found = sampling._uniform(torch.tensor([[key]]), torch.tensor(ids))
    assert found[0].tolist() == [expected(number) for number in ids]
    assert (found > 0).all() and (found < 1).all()
