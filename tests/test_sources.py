"""Encoder-decoders in continuous batches: whatever runs beside it, a source gets the answer that it gets alone."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest
import torch
import transformers

import sublayer
from sublayer.generation import generate
from sublayer.generation.generate import make_options
from sublayer.lm import LM
from sublayer.serving.engine import EncoderDecoderEngine, Limits
from sublayer.serving.job import Event, Job
from support import model_of, random_ids, small
from test_engine import byte_tokenizer

FAMILIES = ["original-base", "t5-small", "flan-t5-base", "bart-base", "opus-mt-en-de"]
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.2, "seed": 3}, {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 4},
    {"repetition_penalty": 1.4}, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
]  # fmt: skip


def lm_of(preset: str = "t5-small", **changes: Any) -> LM:
    return LM(
        model_of(small(preset, **({"vocab_size": 256, "eos_id": 7, "max_positions": 96} | changes))), byte_tokenizer()
    )


def engine_of(lm: LM, pause: float = 0.0, **limits: Any) -> EncoderDecoderEngine:
    engine = EncoderDecoderEngine("pairs", lm, Limits(**limits))
    decode = engine.slots.decode
    engine.slots.decode = lambda: (time.sleep(pause), decode())[1]  # type: ignore[method-assign]
    return engine


def ask(engine: EncoderDecoderEngine, source: list[int], top: int | None = 0, **options: Any) -> tuple[Job, Any]:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    job = Job(prompt=source, deliver=inbox.put, options=make_options(**options), top=top)
    engine.submit([job])
    return job, inbox


def told(inbox: Any) -> list[Event]:
    events = [inbox.get(timeout=20)]
    while not events[-1].last:
        events.append(inbox.get(timeout=20))
    return events


def said(events: list[Event]) -> list[int]:
    return [chance.token for event in events for chance in event.chances]


def alone(lm: LM, source: list[int], **options: Any) -> list[int]:
    out = generate(lm.model, torch.tensor([source]), **options)[0].tolist()
    return out[: out.index(lm.config.eos_id)] if lm.config.eos_id in out else out


@pytest.mark.parametrize("preset", FAMILIES)
def test_sources_together_are_answered_as_alone(preset):
    """Sources of many lengths, more of them than rows, read a few at a time; each with options of its own."""
    lm = lm_of(preset)
    wishes = []
    for number in range(15):
        source = random_ids(1, 1 + 4 * number % 23, seed=number, low=8)[0].tolist()
        wishes.append((source, {"max_new_tokens": 3 + number % 11, **KINDS[number % len(KINDS)]}))
    engine = engine_of(lm, max_batch=4, chunk=40)
    asked = [ask(engine, source, **options) for source, options in wishes]
    engine.start()
    for (source, options), (_, inbox) in zip(wishes, asked, strict=True):
        assert said(told(inbox)) == alone(lm, source, **options), options
    engine.close()
    assert engine.slots.free() == 4 and engine.slots.cached == 0
    held = (*engine.slots.keys, *engine.slots.values, engine.slots.lengths)  # type: ignore[attr-defined]
    assert not any(tensor.any() for tensor in held)


SIZES: dict[str, Any] = dict(vocab_size=256, d_model=32, decoder_start_token_id=0, pad_token_id=0, eos_token_id=7)
HALVES: dict[str, Any] = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
                          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
THEIRS: dict[str, Any] = {
    "T5": dict(num_layers=2, num_heads=4, d_kv=12, d_ff=48),
    "Bart": dict(max_position_embeddings=96, forced_eos_token_id=None, **HALVES),
    "Marian": dict(max_position_embeddings=96, decoder_vocab_size=256, forced_eos_token_id=None, **HALVES),
}


@pytest.mark.parametrize("family", THEIRS)
def test_chances_are_those_of_transformers(family, tmp_path):
    """Log-probabilities against a forward pass over source and answer in the other library."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES, **THEIRS[family])
    kinds = {"T5": "T5ForConditionalGeneration", "Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}
    theirs = getattr(transformers, kinds[family])(config).eval()
    theirs.save_pretrained(tmp_path)
    lm = LM(sublayer.load_model(tmp_path), byte_tokenizer())
    engine = engine_of(lm, max_batch=3)
    sources = [random_ids(1, 3 + 5 * number, seed=number, low=8)[0].tolist() for number in range(3)]
    asked = [ask(engine, source, top=3, max_new_tokens=9, temperature=0.8, seed=1)[1] for source in sources]
    engine.start()
    for source, inbox in zip(sources, asked, strict=True):
        chances = [chance for event in told(inbox) for chance in event.chances]
        tokens = [chance.token for chance in chances]
        assert tokens == alone(lm, source, max_new_tokens=9, temperature=0.8, seed=1)
        assert len(tokens) > 2
        target = torch.tensor([[lm.config.start_id, *tokens[:-1]]])
        with torch.no_grad():
            logs = theirs(input_ids=torch.tensor([source]), decoder_input_ids=target).logits[0].log_softmax(-1)
        for row, chance in zip(logs, chances, strict=True):
            assert chance.logprob == pytest.approx(float(row[chance.token]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in chance.top] == best.indices.tolist()
            assert [value for _, value in chance.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    engine.close()


def test_a_short_answer_does_not_wait_for_a_long_one():
    """It comes while the other is under way, with other options, and leaves before it."""
    lm = lm_of(eos_id=None, max_positions=600)
    engine = engine_of(lm, pause=0.003, max_batch=2)
    engine.start()
    long, first = ask(engine, [9, 10, 11], max_new_tokens=500)
    first.get(timeout=20)
    _, second = ask(engine, [12, 13], max_new_tokens=3, temperature=1.0, seed=5)
    assert said(told(second)) == alone(lm, [12, 13], max_new_tokens=3, temperature=1.0, seed=5)
    assert engine.slots.free() == 1  # the long one is at it still
    long.cancel()
    assert told(first)[-1].error == "cancelled"
    engine.close()


def test_memory_is_planned():
    """2 (keys, values) × 2 layers × heads × size × 4 bytes × rows × (source and answer, and 1 for padding)."""
    engine = EncoderDecoderEngine("pairs", lm_of(), Limits(max_batch=5, max_tokens_cached=200))
    slots: Any = engine.slots
    tensors = [*slots.cache.keys, *slots.cache.values, *slots.keys, *slots.values]
    held = sum(tensor.nbytes for tensor in tensors)
    assert f"{held / 2**20:,.1f} MiB for 400 cached tokens" in engine.plan()
    with pytest.raises(ValueError, match="lower --max-batch"):
        EncoderDecoderEngine("pairs", lm_of(), Limits(max_batch=10**10))


def test_a_source_and_an_answer_may_fill_all_their_places():
    lm = lm_of(eos_id=None)
    engine = engine_of(lm, max_batch=2)
    engine.start()
    source = random_ids(1, 96, low=8)[0].tolist()
    _, inbox = ask(engine, source, max_new_tokens=96)
    assert said(told(inbox)) == alone(lm, source, max_new_tokens=96)
    for wrong in (dict(source=[*source, 9], max_new_tokens=1), dict(source=[9], max_new_tokens=97)):
        with pytest.raises(ValueError, match="96"):
            ask(engine, **wrong)
    engine.close()
