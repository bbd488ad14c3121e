"""Continuous batching: whatever runs beside it, a row gives the answer that it gives alone."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from sublayer.data import Tokenizer
from sublayer.generation import generate
from sublayer.generation.answer import OVERLAP, WINDOW, Answer, Text
from sublayer.generation.generate import make_options
from sublayer.lm import LM
from sublayer.serving.engine import DecoderEngine, Limits
from sublayer.serving.job import Busy, Closing, Event, Job, TooLong
from sublayer.serving.metrics import Metrics
from support import model_of, random_ids, small

TEXTS = [
    "The fox 今天 🚀🙂 naïve…",
    "A film that is a joy to watch. " * 30,
    "机器学习模型需要很多数据。" * 20,
    "aaa\n\n\tb",
]


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(backend)


def fallback_tokenizer() -> Tokenizer:
    """As SentencePiece writes: words are marked at their beginning, and unknown characters become bytes."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefilmnoqrstuwyTAhjx.",
        "▁a",
        "▁to",
        "▁i",
        "is",
    ]
    merges = [("▁", "a"), ("▁", "i"), ("i", "s")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def lm_of(preset: str = "llama-2-7b", **changes: Any) -> LM:
    changes = {"vocab_size": 256, "eos_id": 7, "max_positions": 96} | changes
    return LM(model_of(small(preset, **changes)), byte_tokenizer())


def running(lm: LM, pause: float = 0.0, **limits: Any) -> DecoderEngine:
    """An engine at work; with a pause before each step, there is time to do something in the middle of an answer."""
    engine = DecoderEngine("tiny", lm, Limits(**limits))
    decode = engine.slots.decode
    engine.slots.decode = lambda: (time.sleep(pause), decode())[1]  # type: ignore[method-assign]
    engine.start()
    return engine


class Inbox(queue.SimpleQueue[Event]):
    """The events of one job."""

    def all(self) -> list[Event]:
        events = [self.get(timeout=20)]
        while not events[-1].last:
            events.append(self.get(timeout=20))
        return events


def ask(engine: DecoderEngine, prompt: list[int], **more: Any) -> tuple[Job, Inbox]:
    inbox = Inbox()
    options = {name: more.pop(name) for name in list(more) if name not in ("stop", "top", "deadline")}
    job = Job(prompt=prompt, deliver=inbox.put, options=make_options(**options), **more)
    engine.submit([job])
    return job, inbox


def alone(lm: LM, prompt: list[int], **options: Any) -> list[int]:
    """What `generate` says, up to the end."""
    out = generate(lm.model, torch.tensor([prompt]), **options)[0].tolist()
    ends = [n for n, token in enumerate(out, 1) if token == lm.config.eos_id]
    return out[: ends[0]] if ends else out


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), fallback_tokenizer()], ids=["bytes", "fallback"])
@given(data=st.data())
def test_text_in_pieces_is_the_text_of_all_tokens(tokenizer, data):
    """The stretch that is decoded together moves along; the whole answer decoded at once is the reference."""
    texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4))
    ids = tokenizer.encode("".join(texts))[: 3 * WINDOW]
    text, answer, shown = Text(tokenizer), Answer(tokenizer), ""
    whole = ""
    for token in ids:
        whole = text.add(token)
        piece = answer.add(token)[0]
        shown += piece
        assert "�" not in piece
    assert whole == tokenizer.decode(ids)
    assert shown + answer.finish()[0] == whole
    assert len(text.ids) <= WINDOW + OVERLAP or tokenizer.is_byte(ids[-1])  # a run of bytes is decoded as one


@given(
    text=st.text("ab今", max_size=12), stop=st.lists(st.text("ab今", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_nothing_of_a_stop_string_is_shown(text, stop):
    """The stop string that is complete first cuts the text where it begins, in whatever pieces the text comes."""
    tokenizer = byte_tokenizer()
    answer, shown = Answer(tokenizer, stop), ""
    for token in tokenizer.encode(text):
        if not answer.stopped:
            shown += answer.add(token)[0]
    shown += answer.finish()[0]
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert answer.stopped == bool(ends)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("llama-2-7b", {}), ("gpt2", {}), ("llama-2-7b", {"window": 5}), ("gpt2", {"positions": "alibi"})],
)
def test_rows_together_answer_as_alone(preset, changes):
    """Prompts of many lengths, more of them than rows, in chunks of 4; greedy and drawn, plain and penalised."""
    lm = lm_of(preset, **changes)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.2, "seed": 3}, {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 4},
        {"repetition_penalty": 1.4}, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
    ]  # fmt: skip
    wishes = []
    for number in range(15):
        prompt = random_ids(1, 1 + 4 * number % 23, seed=number, low=8)[0].tolist()
        wishes.append((prompt, {"max_new_tokens": 3 + number % 11, **kinds[number % len(kinds)]}))
    expected = [alone(lm, prompt, **options) for prompt, options in wishes]
    engine = running(lm, max_batch=4, chunk=4)
    asked = [ask(engine, prompt, **options) for prompt, options in wishes]
    for (job, inbox), tokens in zip(asked, expected, strict=True):
        events = inbox.all()
        ended = tokens[-1] == lm.config.eos_id
        assert events[-1].tokens == len(tokens), job.options
        assert events[-1].reason == ("stop" if ended else "length")
        said = tokens[:-1] if ended else tokens
        assert "".join(event.text for event in events) == lm.tokenizer.decode(said), job.options
    engine.close()
    assert engine.slots.free() == 4 and engine.slots.cached == 0


def test_short_texts_do_not_disturb_a_long_prompt_between_them():
    """What is padding for a step of the rows around it must not be written over what a prompt has put there."""
    lm = lm_of(eos_id=None, max_positions=300)
    long = random_ids(1, 200, low=8)[0].tolist()
    wishes = [([9, 10], 80), ([13], 1), ([11, 12], 80), (long, 20)]  # the last takes the place of the second
    engine = DecoderEngine("tiny", lm, Limits(max_batch=3, chunk=4))
    asked = [ask(engine, prompt, max_new_tokens=count, top=0)[1] for prompt, count in wishes]
    engine.start()
    for (prompt, count), inbox in zip(wishes, asked, strict=True):
        chances = [chance for event in inbox.all() for chance in event.chances]
        said = [chance.token for chance in chances]
        assert said == alone(lm, prompt, max_new_tokens=count)
        assert [chance.logprob for chance in chances] == pytest.approx(lm.logprobs(prompt, said)[0], abs=1e-4)
    engine.close()


def test_dynamic_angles_are_those_of_the_whole_prompt():
    from sublayer import RotaryScaling

    lm = lm_of(rotary_scaling=RotaryScaling(kind="dynamic", factor=4.0), max_positions=16)
    engine = DecoderEngine("tiny", lm, Limits(max_batch=2, chunk=4))
    assert engine.slots.chunk == engine.capacity == 16


def test_chances_are_the_models_own():
    """Log-probabilities against a forward pass over the finished text."""
    lm = lm_of(eos_id=None)
    prompt = random_ids(1, 9, low=8)[0].tolist()
    engine = running(lm, max_batch=3)
    _, inbox = ask(engine, prompt, max_new_tokens=12, temperature=0.8, seed=1, top=3)
    events = inbox.all()
    engine.close()
    chances = [chance for event in events for chance in event.chances]
    said = alone(lm, prompt, max_new_tokens=12, temperature=0.8, seed=1)
    assert [chance.token for chance in chances] == said
    logs = lm.model(torch.tensor([prompt + said])).detach()[0].log_softmax(-1)
    for place, chance in enumerate(chances, len(prompt) - 1):
        assert chance.logprob == pytest.approx(float(logs[place, chance.token]), abs=1e-4)
        best = logs[place].topk(3)
        assert [token for token, _ in chance.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in chance.top]), best.values, atol=1e-4, rtol=0)


def test_a_cancelled_job_frees_its_row_and_others_go_on():
    lm = lm_of(eos_id=None, max_positions=2000)
    engine = running(lm, pause=0.003, max_batch=1, queue=2)
    job, inbox = ask(engine, [9, 10], max_new_tokens=1900)
    waiting, unanswered = ask(engine, [9], max_new_tokens=2)
    _, second = ask(engine, [9, 11], max_new_tokens=4)
    with pytest.raises(Busy) as full:
        ask(engine, [9], max_new_tokens=1)
    assert 1 <= full.value.retry_after <= 60
    inbox.get(timeout=20)
    waiting.cancel()
    job.cancel()
    assert second.all()[-1].tokens == len(alone(lm, [9, 11], max_new_tokens=4))
    assert inbox.all()[-1].error == "cancelled"
    assert unanswered.all()[-1].error == "cancelled"
    engine.close()


def test_deadline_ends_an_answer_and_a_wait():
    lm = lm_of(eos_id=None, max_positions=2000)
    engine = running(lm, pause=0.003, max_batch=1)
    _, first = ask(engine, [9, 10], max_new_tokens=1900, deadline=time.monotonic() + 0.2)
    _, second = ask(engine, [9, 10], max_new_tokens=1900, deadline=time.monotonic() + 0.1)
    assert first.all()[-1].error == "timeout"
    assert second.all()[-1] == Event(error="timeout")
    engine.close()


def test_closing_finishes_what_runs_and_turns_the_rest_away():
    lm = lm_of(eos_id=None, max_positions=400)
    engine = running(lm, pause=0.003, max_batch=1)
    _, first = ask(engine, [9, 10], max_new_tokens=200)
    _, second = ask(engine, [9, 10], max_new_tokens=200)
    first.get(timeout=20)
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert first.all()[-1].tokens == 200
    assert second.all()[-1].error == "closing"
    closer.join(20)
    with pytest.raises(Closing):
        ask(engine, [9], max_new_tokens=1)
    assert not engine.alive


def test_closing_does_not_wait_for_ever():
    lm = lm_of(eos_id=None, max_positions=4000)
    engine = running(lm, pause=0.003, max_batch=1, max_tokens_cached=4000)
    _, inbox = ask(engine, [9, 10], max_new_tokens=3900)
    inbox.get(timeout=20)
    engine.close(timeout=0.05)
    assert inbox.all()[-1].error == "closing"


def test_a_step_that_fails_loses_its_answers_only(monkeypatch):
    lm = lm_of(eos_id=None)
    engine = running(lm, max_batch=2)
    whole, calls = lm.model.features, []

    def features(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return whole(*args, **more)

    monkeypatch.setattr(lm.model, "features", features)
    assert ask(engine, [9, 10], max_new_tokens=20)[1].all()[-1].error == "internal"
    assert ask(engine, [9, 10], max_new_tokens=20)[1].all()[-1].reason == "length"
    engine.close()


def test_a_device_that_is_lost_is_told_to_everyone(monkeypatch):
    def lost(*args: Any, **more: Any) -> Any:
        raise RuntimeError("the device is gone")

    lm = lm_of(eos_id=None)
    engine = DecoderEngine("tiny", lm, Limits(max_batch=2))
    monkeypatch.setattr(lm.model, "features", lost)
    monkeypatch.setattr(engine.slots.cache, "clear", lost)
    inboxes = [ask(engine, [9, 10], max_new_tokens=20)[1] for _ in range(3)]
    engine.start()
    assert [inbox.all()[-1].error for inbox in inboxes] == ["internal", "internal", "closing"]
    assert not engine.alive
    with pytest.raises(Closing):
        ask(engine, [9], max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "no tokens"),
        ([9] * 97, {}, "97 tokens; at most 96"),
        ([9] * 90, {"max_new_tokens": 8}, "do not fit"),
        ([256], {}, "token 256 .* not among the 256"),
        ([-1], {}, "token -1"),
        ([9], {"logit_bias": {999: 1.0}}, "token 999"),
    ],
)
def test_wrong_jobs_are_refused_before_they_are_queued(prompt, options, message):
    engine = DecoderEngine("tiny", lm_of(), Limits(max_batch=1))
    with pytest.raises(ValueError, match=message):
        ask(engine, prompt, **({"max_new_tokens": 1} | options))
    assert not engine.waiting


def test_exactly_what_fits_is_answered():
    """The last token is not read again: 96 places hold 90 tokens and 7 of an answer."""
    lm = lm_of(eos_id=None)
    engine = running(lm, max_batch=2)
    prompt = random_ids(1, 90, low=8)[0].tolist()
    assert ask(engine, prompt, max_new_tokens=7)[1].all()[-1].tokens == 7
    assert ask(engine, prompt + [9] * 6, max_new_tokens=1)[1].all()[-1].tokens == 1
    with pytest.raises(TooLong):
        ask(engine, prompt, max_new_tokens=8)
    engine.close()


def test_memory_is_planned():
    """2 (keys, values) × 2 layers × heads × size × 4 bytes × rows × (tokens + 1 for padding)."""
    lm = lm_of()
    engine = DecoderEngine("tiny", lm, Limits(max_batch=5, max_tokens_cached=200))
    tensors = [*engine.slots.cache.keys, *engine.slots.cache.values]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert engine.capacity == 40
    assert f"{held / 2**20:,.1f} MiB for 200 cached tokens" in engine.plan()
    with pytest.raises(ValueError, match="lower --max-batch"):
        DecoderEngine("tiny", lm, Limits(max_batch=10**10))
    with pytest.raises(ValueError, match="max_tokens_cached is 3"):
        Limits(max_batch=5, max_tokens_cached=3)


def test_rows_of_a_cache_share_its_memory():
    lm = lm_of()
    cache = lm.model.make_cache(3, 12)
    ids = random_ids(1, 5, low=8)
    lm.model(ids, cache=cache.rows(1, 2, 8))
    assert cache.lengths.tolist() == [0, 5, 0]
    other = lm.model.make_cache(1, 5)
    lm.model(ids, cache=other)
    torch.testing.assert_close(cache.keys[0][1, :5], other.keys[0][0, :5])
    assert not cache.keys[0][[0, 2]].any()
    cache.clear(1)
    assert cache.lengths.tolist() == [0, 0, 0] and not cache.values[1][1].any()


def test_histogram_counts_what_was_seen():
    metrics = Metrics()
    for seconds in (0.01, 0.02, 3.0, 500.0):
        metrics.observe("request_seconds", seconds, model='a "b"\n')
    text = metrics.text()
    label = 'model="a \\"b\\"\\n"'
    for edge, count in (("0.01", 1), ("0.025", 2), ("2.5", 2), ("5.0", 3), ("120.0", 3), ("+Inf", 4)):
        assert f'sublayer_request_seconds_bucket{{{label},le="{edge}"}} {count}\n' in text
    assert f"sublayer_request_seconds_count{{{label}}} 4\n" in text
    assert metrics.mean("request_seconds", model='a "b"\n') == pytest.approx(503.03 / 4)
