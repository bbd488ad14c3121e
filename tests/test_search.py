"""Answers equal those of transformers, token for token: greedy and beam search, alone and in ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import sublayer
from sublayer.generation import sampling
from sublayer.generation.beam import length_divisor
from sublayer.generation.generate import make_options, search
from support import seeded

VOCAB, EOS, PAD = 33, 2, 32
SIZES = dict(vocab_size=VOCAB, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=1)
DECODERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SIZES)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            **SIZES,
        )
    ),
}  # fmt: skip
SIDES = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **SIZES,
)  # fmt: skip
ENCODER_DECODERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD, **SIZES
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(decoder_start_token_id=EOS, forced_eos_token_id=EOS, **SIDES)
    ),
    "marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(decoder_start_token_id=PAD, decoder_vocab_size=VOCAB, **SIDES)
    ),
}  # fmt: skip
FAMILIES = {**DECODERS, **ENCODER_DECODERS}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A random model of theirs whose answers end now and then, and ours with its weights."""
    torch.manual_seed(3)
    theirs = FAMILIES[request.param]().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # not the sinusoids of Marian
                parameter.mul_(3.0)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return request.param, theirs, sublayer.load_model(folder)


def prompts(name: str, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths: decoders' padded on the left, sources on the right."""
    generator = seeded(seed)
    lengths = [7, 3, 5, 1, 6][:rows]
    ids = torch.full((rows, max(lengths)), PAD)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(max(lengths) - length, None) if name in DECODERS else slice(0, length)
        ids[row, place] = torch.randint(3, PAD, (length,), generator=generator)
        mask[row, place] = True
    return ids, mask


def reference(theirs: Any, name: str, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    out = theirs.generate(ids, attention_mask=mask.long(), do_sample=False, **options)
    return out[:, ids.size(1) if name in DECODERS else 1 :]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal up to padding at the end, of which one side may have more."""
    length = max(ours.size(1), theirs.size(1))
    one, other = (torch.nn.functional.pad(x, (0, length - x.size(1)), value=PAD) for x in (ours, theirs))
    return torch.equal(one, other)


GREEDY = [{}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1}]


@pytest.mark.parametrize("options", GREEDY, ids=str)
def test_greedy_equals_transformers(pair, options):
    name, theirs, ours = pair
    ids, mask = prompts(name, 5)
    mine = {("no_repeat_ngrams" if key == "no_repeat_ngram_size" else key): value for key, value in options.items()}
    expected = reference(theirs, name, ids, mask, max_new_tokens=12, **options)
    if name in DECODERS and options:
        # Theirs counts padding as part of the text: compare each row alone.
        for row in range(len(ids)):
            one = ids[row][mask[row]][None]
            expected = reference(theirs, name, one, torch.ones_like(one), max_new_tokens=12, **options)
            assert same(sublayer.generate(ours, one, max_new_tokens=12, **mine), expected)
        return
    assert same(sublayer.generate(ours, ids, mask=mask, max_new_tokens=12, **mine), expected)


BEAMS = [
    dict(num_beams=beams, length_penalty=penalty, early_stopping=early)
    for beams in (2, 4, 5)
    for penalty, early in ((1.0, False), (0.6, True), (2.0, "never"), (0.0, False), (-0.5, "never"))
]


@pytest.mark.parametrize("options", BEAMS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_beams_equal_transformers(pair, options, rows):
    name, theirs, ours = pair
    ids, mask = prompts(name, rows, seed=rows)
    expected = reference(theirs, name, ids, mask, max_new_tokens=10, **options)
    assert same(sublayer.generate(ours, ids, mask=mask, max_new_tokens=10, **options), expected)


@torch.inference_mode()
def test_scores_are_the_mean_log_probabilities_of_the_answers(pair, monkeypatch):
    """Recomputed from one pass over prompt and answer, without a cache."""
    name, _, ours = pair
    ids, _mask = prompts(name, 1)
    monkeypatch.setattr(ours, "generation", {})  # a forced end has no probability of the model's
    beams = search(ours, ids, make_options(max_new_tokens=8, num_beams=4, length_penalty=0.7))
    assert (beams.scores[0].diff() <= 0).all()
    for answer, score in zip(beams.tokens[0], beams.scores[0], strict=True):
        length = next((n for n, token in enumerate(answer.tolist(), 1) if token == EOS), len(answer))
        answer = answer[:length][None]
        if name in DECODERS:
            logits = ours(torch.cat([ids, answer], 1))[:, ids.size(1) - 1 : -1]
        else:
            logits = ours(ids, torch.cat([torch.tensor([[ours.config.start_id]]), answer[:, :-1]], 1))
        logs = logits.log_softmax(-1).gather(2, answer[:, :, None]).sum()
        assert float(logs) / length**0.7 == pytest.approx(float(score), rel=1e-4)


def test_beams_alone_and_in_a_batch_agree(pair):
    name, _, ours = pair
    ids, mask = prompts(name, 5)
    together = sublayer.generate(ours, ids, mask=mask, max_new_tokens=9, num_beams=3)
    for row in range(5):
        alone = sublayer.generate(ours, ids[row][mask[row]][None], max_new_tokens=9, num_beams=3)
        assert same(alone, together[row : row + 1])


def test_length_penalties():
    assert length_divisor(7, 0.6, "power") == pytest.approx(7**0.6)
    assert length_divisor(7, 0.6, "gnmt") == pytest.approx(((5 + 7) / 6) ** 0.6)  # Wu et al. 2016, equation 14


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4))
def test_no_ngram_comes_twice(text, size):
    """A token is forbidden exactly if the text with it would have some run twice that ends there."""
    scores = sampling.no_repeat_ngrams(torch.zeros(1, 6), [text], size)[0]
    runs = [tuple(text[n : n + size]) for n in range(len(text) - size + 1)]
    for token in range(6):
        new = (*text[len(text) - size + 1 :], token) if size > 1 else (token,)
        assert (scores[token] == -torch.inf) == (len(new) == size and new in runs)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12), st.floats(0.1, 0.999))
def test_typical_equals_transformers(logits, p):
    scores = torch.tensor([logits])
    warp = transformers.TypicalLogitsWarper(mass=p, min_tokens_to_keep=1)
    kept, expected = sampling.typical(scores, p), warp(None, scores)
    assert torch.equal(kept.isinf(), expected.isinf())
