"""Answers bound to a form: what a random model says, which knows nothing, is always of it."""

from __future__ import annotations

import itertools
import json
import re
import string
import sys
import threading
from contextlib import nullcontext, suppress
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import NoBadWordsLogitsProcessor

import sublayer
from sublayer.data import Tokenizer
from sublayer.data.pieces import pieces_of
from sublayer.generation import constraint
from sublayer.generation.constraint import Stuck, grammar_of
from sublayer.generation.options import Options, Text, adjuster
from sublayer.lm import LM
from support import model_of, random_ids, small
from support_constraint import KINDS, lm_of, tokenizer_of

MODES: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 3.0, "seed": 2}, {"temperature": 1.5, "top_p": 0.7, "seed": 3},
    {"num_beams": 3}, {"num_beams": 4, "beam_groups": 2, "diversity_penalty": 0.5}, {"temperature": 1.0, "top_k": 2},
    {"lookup": True}, {"repetition_penalty": 1.5}, {"no_repeat_ngrams": 2},
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b \"c\"", None]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "boolean"}, {"const": {"x": [1, "é"]}}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
}  # fmt: skip


def checked(lm: LM, texts: list[str], test: Any, **options: Any) -> int:
    """How many answers came to an end; each of them passes the test."""
    details = lm.generate_details(texts, top=None, **options)
    ended = [detail for detail in details if detail.finish_reason == "stop"]
    for detail in ended:
        test(detail.text)
    return len(ended)


def validates(schema: Any) -> Any:
    return lambda text: jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_are_what_the_decoder_says(kind, data):
    tokenizer = tokenizer_of(kind)
    pieces = pieces_of(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(pieces.later) - 1), max_size=12))
    said = [token for token in ids if token not in tokenizer.special_ids()]
    text = b"".join(pieces.later[token] if place else pieces.first[token] for place, token in enumerate(said))
    try:
        assert text.decode() == tokenizer.decode(ids)
    except UnicodeDecodeError:
        assert "�" in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_mask_has_exactly_the_tokens_that_go_on(kind, data):
    """Against a search by hand through a finite language, at every place of a random walk."""
    tokenizer = tokenizer_of(kind)
    words = st.text(alphabet=st.sampled_from('ab yes{"é1. '), min_size=1, max_size=8)
    language = data.draw(st.lists(words, min_size=1, max_size=5))
    pieces, ends = pieces_of(tokenizer), [1, 8]  # 8 is a token of the text; as an end, it is none
    size = len(pieces.later) + 3
    tails = {word.encode() for word in language}
    try:
        guide = grammar_of(tokenizer, "regex", "|".join(map(re.escape, language)))(ends, size)
    except ValueError:  # the vocabulary has not these letters
        assert not any(word.startswith(piece) for word in tails for piece in pieces.first if piece)
        return
    row: list[int] = []
    while True:
        now = pieces.later if row else pieces.first
        plain = [token for token in range(len(now)) if token not in ends and pieces.later[token]]
        fits = {token for token in plain if any(word.startswith(now[token]) for word in tails)}
        fits |= set(ends) if b"" in tails else set()
        if not fits:
            with pytest.raises(Stuck):
                guide([row])
            return
        assert set(guide([row])[0].nonzero().flatten().tolist()) == fits
        token = data.draw(st.sampled_from(sorted(fits)))
        if token in ends:
            return
        tails = {word[len(now[token]) :] for word in tails if word.startswith(now[token])}
        row = [*row, token]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("kind", "preset"), [("bpe", "llama-2-7b"), ("sentencepiece", "gpt2"), ("bytes", "t5-small")])
def test_answers_are_json_of_the_schema(kind, preset, mode):
    lm = lm_of(kind, preset)
    texts = ["a person", "x"]
    assert checked(lm, texts, validates(PERSON), json_schema=PERSON, max_new_tokens=1000, **mode) == len(texts)


def test_many_seeds():
    lm = lm_of("bpe")
    for seed in range(30):
        options = dict(temperature=1.0 + seed % 3, seed=seed, max_new_tokens=1000)
        assert checked(lm, ["he said"], validates(PERSON), json_schema=PERSON, **options) == 1
        # Any JSON may go on for long; what ends is JSON.
        checked(lm, ["he said"], json.loads, json_schema=bool(seed % 2) or {}, **(options | dict(max_new_tokens=40)))


def schemas() -> Any:
    """Those whose instances are short, so that an answer ends."""
    bounds = st.tuples(st.integers(-30, 30), st.integers(0, 200))
    lengths = st.tuples(st.integers(0, 3), st.integers(0, 3))
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"const": [1, {"a": None}]}, {"enum": ["x", 2.5, "é\n"]}]),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        lengths.map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[0] + b[1]}),
        st.sampled_from(["^[a-c]{1,3}$", "^x?\"\\\\$", "^(ab|c)d$"]).map(lambda p: {"type": "string", "pattern": p}),
        st.just({"type": "string", "format": "date"}),
    )  # fmt: skip

    def deeper(inner: Any) -> Any:
        fields = st.dictionaries(st.sampled_from(["a", "b c", 'q"', "é"]), inner, max_size=3)
        return st.one_of(
            st.tuples(inner, lengths).map(
                lambda x: {"type": "array", "items": x[0], "minItems": x[1][0], "maxItems": sum(x[1])}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda x: {"anyOf": x}),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda x: {"type": "array", "prefixItems": x, "items": False, "minItems": len(x)}
            ),
            st.tuples(fields, st.booleans()).map(
                lambda x: {
                    "type": "object", "properties": x[0], "required": list(x[0]) if x[1] else [],
                    "additionalProperties": False,
                }
            ),
        )  # fmt: skip

    return st.recursive(leaves, deeper, max_leaves=5)


@given(schema=schemas(), seed=st.integers(0, 1000), kind=st.sampled_from(["bpe", "sentencepiece"]))
@settings(max_examples=40, deadline=None)
def test_any_schema(schema, seed, kind):
    options = dict(temperature=1.5, seed=seed, max_new_tokens=1000)
    assert checked(lm_of(kind), ["it is"], validates(schema), json_schema=schema, **options) == 1


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "metaspace", "wordpiece"])
@given(
    parts=st.lists(
        st.sampled_from(["[a-c]", "(yes|no)", "x?", "[0-9]{2,4}", "a{0,3}", r"\.", " ", '"', "[^a-z]"]),
        min_size=1,
        max_size=6,
    ),
    mode=st.sampled_from([{}, {"temperature": 2.0, "seed": 5}, {"num_beams": 3}]),
)
@settings(max_examples=15, deadline=None)
def test_answers_are_matched_by_the_expression(kind, parts, mode):
    regex, lm = "".join(parts), lm_of(kind, "t5-small")

    def matches(text: str) -> None:
        assert re.fullmatch(regex, text)

    with (
        suppress(ValueError) if kind in ("metaspace", "wordpiece") else nullcontext()
    ):  # some vocabularies spell little
        checked(lm, ["the fox", "12"], matches, regex=regex, max_new_tokens=100, **mode)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "(" root ")" root | [a-c]{0,2}', 'start: "(" start ")" start | /[a-c]{0,2}/'],
    ids=["gbnf", "lark"],
)
def test_answers_are_of_the_grammar(grammar):
    def balanced(text: str) -> None:
        assert re.fullmatch("[abc()]*", text)
        while text != (shorter := re.sub(r"\([abc]*\)", "", text)):
            text = shorter
        assert re.fullmatch("[a-c]{0,2}", text)

    lm = lm_of("bpe")
    ended = [
        checked(lm, ["a", "the quick fox"], balanced, grammar=grammar, temperature=1.0, seed=seed, max_new_tokens=60)
        for seed in range(10)
    ]
    assert sum(ended) > 5


def test_a_row_is_as_it_is_alone_and_a_stream_as_a_whole():
    lm = lm_of("bpe")
    texts = ["a", "the quick brown fox said", "{"]
    for mode in ({}, {"temperature": 1.0, "seed": 4}, {"num_beams": 3}):
        options = dict(json_schema=PERSON, max_new_tokens=1000, **mode)
        together = lm.generate(texts, **options)
        assert together == [lm.generate(text, **options) for text in texts]
        assert together == ["".join(lm.stream(text, **options)) for text in texts]
    guessed = lm.generate(texts, json_schema=PERSON, max_new_tokens=1000, lookup=True)
    assert guessed == lm.generate(texts, json_schema=PERSON, max_new_tokens=1000)


@pytest.mark.parametrize("preset", ["llama-2-7b", "t5-small"])
@pytest.mark.parametrize("mode", [{}, {"temperature": 1.0, "seed": 3}, {"num_beams": 3}], ids=str)
def test_a_constraint_that_allows_all_changes_nothing(preset, mode):
    model, ids = model_of(small(preset)), random_ids(2, 5)

    def anything(ends: Any, size: int) -> Any:
        return lambda rows: torch.ones(len(rows), size, dtype=torch.bool)

    plain = sublayer.generate(model, ids, max_new_tokens=12, **mode)
    assert torch.equal(plain, sublayer.generate(model, ids, max_new_tokens=12, constraint=anything, **mode))


def test_beams_find_the_likeliest_of_all_answers():
    lm = lm_of("bytes", eos_id=1)
    language = [a + b for a in ("yes", "no", "maybe") for b in ("", " sir", "!")]
    prompt = lm.tokenizer.encode("well")
    scores = {text: sum(lm.logprobs(prompt, [*lm.tokenizer.encode(text, special=False), 1])[0]) for text in language}
    found = lm.generate("well", regex="(yes|no|maybe)( sir|!)?", num_beams=16, length_penalty=0.0, max_new_tokens=20)
    assert found == max(scores, key=scores.__getitem__)


def test_nothing_else_can_break_the_form():
    lm = lm_of("bpe")
    quote = lm.tokenizer.encode('"')[0]
    for options in (
        {"suppress": [1, quote]}, {"logit_bias": {1: -100.0, 40: 100.0}}, {"bad_words": [[quote]]},
        {"forced_last": 1}, {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    ):  # fmt: skip
        assert checked(lm, ["a", "b"], validates(PERSON), json_schema=PERSON, max_new_tokens=1000, **options) == 2


def test_a_first_token_that_is_forced_is_no_part_of_the_form():
    lm = lm_of("bytes", "bart-base")
    detail = lm.generate_details("x", regex="ab|ba", forced_first=0, max_new_tokens=9)[0]
    assert detail.ids[0] == 0 and detail.text in ("ab", "ba") and detail.finish_reason == "stop"


def test_an_answer_without_room_is_cut():
    lm = lm_of("bytes")
    detail = lm.generate_details("x", regex="a{20}", max_new_tokens=7)[0]
    assert (detail.text, detail.finish_reason) == ("a" * 7, "length")
    detail = lm.generate_details("x", regex="a{20}", max_new_tokens=7, forced_last=1)[0]
    assert (detail.text, detail.finish_reason) == ("a" * 7, "length")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "(a"}, "regex cannot be followed: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": 7}, "regex is '7'; expected a string"),
        ({"regex": "a" * 70_000}, "regex has 70,000 bytes; at most 8,192 are read"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "exclude each other"),
        ({"json_schema": {"type": "strin"}}, "strin"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"$ref": "https://example.org/schema"}}, "example.org"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": "object"}, "expected a schema, or True"),
        ({"json_schema": {"const": float("nan")}}, "is no JSON"),
        ({"json_schema": {"minimum": 3, "maximum": 2, "type": "integer"}}, "greater than maximum"),
        ({"grammar": "hello"}, "grammar cannot be followed"),
        ({"grammar": "root ::= other"}, "'other' not found"),
        ({"grammar": 'root ::= "a"' + "\n" * 60_000}, "at most 8,192"),
        ({"json_schema": {"const": "é" * 10_000}}, "at most 32,768"),
        ({"grammar": "root ::= root"}, "no token of the vocabulary begins"),
        ({"grammar": "start: <[1]>"}, "no token of the vocabulary begins"),
        ({"regex": "a", "eos_id": [999]}, "no end token"),
        ({"bad_words": [[3], []]}, "bad_words"),
        ({"bad_words": [[3, 5000]]}, "token 5000"),
    ],
)
def test_what_is_wrong_is_one_line(options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        lm_of("bpe").generate("x", **options)
    assert "\n" not in str(caught.value)


def test_deep_and_large_ones_are_refused_not_followed():
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    nested = "(" * 4000 + "a" + ")" * 4000
    doubling = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "a" | ""\nroot ::= r0'
    for options in ({"json_schema": deep}, {"regex": nested}, {"grammar": f"start: {nested}"}, {"grammar": doubling}):
        with pytest.raises(ValueError, match="cannot be followed"):
            lm_of("bpe").generate("x", max_new_tokens=5, **options)


def test_as_many_rules_as_fit_are_followed():
    """Rules within rules take stack; as many as are read must not take all of it, in any thread."""
    names = [a + b for a, b in itertools.product(string.ascii_lowercase, string.ascii_lowercase + string.digits)]
    names += [f"x{name}" for name in names][:170]
    rules = "\n".join(f"{one}: {other}" for one, other in itertools.pairwise(names))
    grammar = f'start: {names[0]}\n{rules}\n{names[-1]}: "yes"'
    assert 8000 < len(grammar) <= constraint.KINDS["grammar"]
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(lm_of("bytes").generate("x", grammar=grammar)))
    thread.start()
    thread.join()
    assert found == ["yes"]


def test_one_that_grows_too_complex_ends_with_an_error_not_with_anything():
    """The work of a step is bounded; where that is not enough, no unbound text comes instead."""
    grammar = 'start: ((("a"{1,1000}){1,1000}){1,1000})'
    for mode in ({}, {"num_beams": 3}, {"lookup": True}):
        with pytest.raises(ValueError, match="the answer cannot go on as the constraint asks"):
            lm_of("bytes").generate("x", grammar=grammar, suppress=[1], max_new_tokens=300, **mode)


def test_a_decoder_that_looks_ahead_is_refused():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b</w>": 1}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(ValueError, match="'BPEDecoder'"):
        pieces_of(Tokenizer(backend))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Tokenizer(tokenizer_of("bytes").backend)
    with pytest.raises(ValueError, match=r"pip install 'sublayer\[grammar\]'"):
        grammar_of(fresh, "regex", "a")


def test_grammars_are_kept_and_let_go(monkeypatch):
    monkeypatch.setattr(constraint, "KEPT", 3)
    tokenizer = Tokenizer(tokenizer_of("bytes").backend)
    first = grammar_of(tokenizer, "regex", "a")
    assert grammar_of(tokenizer, "regex", "a") is first
    assert grammar_of(tokenizer, "json_schema", {"const": "a"}) is not first
    for number in range(3):
        grammar_of(tokenizer, "regex", f"b{number}")
    assert grammar_of(tokenizer, "regex", "a") is not first
    # Schemas that differ in order only ask for different texts.
    ordered = [{"properties": {a: {"const": 1}, b: {"const": 2}}, "required": ["a", "b"]} for a, b in ("ab", "ba")]
    assert grammar_of(tokenizer, "json_schema", ordered[0]) is not grammar_of(tokenizer, "json_schema", ordered[1])


def test_threads_share_grammars():
    lm, found, wrong = lm_of("bpe"), {}, []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                regex = f"[a-c]{{{number % 3 + 1}}}"
                found[number] = lm.generate("x", regex=regex, temperature=1.0, seed=number)
                assert re.fullmatch(regex, found[number])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(found) == 6


tokens = st.integers(0, 11)


@given(
    prompt=st.lists(tokens, min_size=1, max_size=6), new=st.lists(tokens, max_size=4),
    words=st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6), as_setting=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_bad_words_are_those_of_transformers(prompt, new, words, as_setting):
    model = model_of(small("llama-2-7b", vocab_size=12, eos_id=1))
    ids, said = torch.tensor([prompt]), torch.tensor([new], dtype=torch.long)
    scores = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=1)(torch.cat([ids, said], 1), scores)
    model.generation = {"bad_words_ids": words} if as_setting else {}
    options = Options(max_new_tokens=9, bad_words=() if as_setting else words)
    adjust = adjuster(model, Text(ids, torch.ones_like(ids, dtype=torch.bool)), options)
    assert torch.equal(adjust(scores, said), expected)
