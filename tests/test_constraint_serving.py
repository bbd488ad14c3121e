"""Answers bound to a form, as clients of the server and users of the command line ask for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

import sublayer
from sublayer.cli import main
from sublayer.lm import LM
from sublayer.serving import Limits
from support_constraint import lm_of
from support_serving import Running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Where?"}]


class Place(BaseModel):
    name: str = Field(max_length=5)
    kind: Literal["city", "sea"]
    size: int | None = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(folders: Any) -> Iterator[Running]:
    models = [str(folders[name]) for name in ("tiny", "pairs", "endless")]
    out = Running(models, limits=Limits(max_batch=6, queue=40, chunk=16))
    yield out
    out.stop()


@pytest.fixture(scope="module")
def lm(folders: Any) -> LM:
    return sublayer.load(folders["tiny"])


def asked(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_a_schema_as_openai_has_it(client, lm):
    options = dict(model="tiny", messages=ASKED, max_tokens=300)
    answer = client.chat.completions.create(
        **options, temperature=0, response_format=asked(SCHEMA, strict=True, description="a place")
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == lm.chat(ASKED, json_schema=SCHEMA, max_new_tokens=300)
    several = client.chat.completions.create(**options, seed=3, n=3, logprobs=True, response_format=asked(SCHEMA))
    for number, choice in enumerate(several.choices):
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        alone = lm.chat(ASKED, json_schema=SCHEMA, max_new_tokens=300, temperature=1.0, seed=3 + number)
        assert choice.message.content == alone
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content


def test_the_client_reads_answers_into_its_own_classes(client):
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="tiny", messages=ASKED, response_format=Place, max_tokens=400, temperature=1.5, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Place)


def test_any_object(client):
    ended = 0
    for seed in range(12):
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, response_format={"type": "json_object"}, max_tokens=60, seed=seed
        )
        choice = answer.choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
            ended += 1
    assert ended


def test_plain_text_is_not_bound(client, lm):
    for form in ({"type": "text"}, None):
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, response_format=form, temperature=0, max_tokens=9
        )
        assert answer.choices[0].message.content == lm.chat(ASKED, max_new_tokens=9)


@pytest.mark.parametrize("model", ["tiny", "pairs"])
def test_expressions_and_grammars(client, folders, model):
    lm = sublayer.load(folders[model])
    for extra in ({"regex": "[0-9]{2}-(a|b)"}, {"grammar": 'root ::= [a-c]{3} "!"?'}):
        for mode in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 6}):
            answer = client.completions.create(model=model, prompt=["x", "yz"], max_tokens=20, extra_body=extra, **mode)
            texts = [choice.text for choice in answer.choices]
            assert texts == [lm.generate(text, max_new_tokens=20, **extra, **mode) for text in ("x", "yz")]
            assert all(re.fullmatch(r"[0-9]{2}-[ab]|[a-c]{3}!?", text) for text in texts)


def test_a_stream_is_the_whole_in_pieces(client):
    options = dict(model="tiny", messages=ASKED, response_format=asked(SCHEMA), max_tokens=300, seed=9)
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole and len(pieces) > 5


def test_clients_at_once_each_get_their_own_form(client, lm):
    schemas = [{"const": f"answer {number}"} for number in range(5)]
    schemas += [{"type": "array", "items": {"const": number}, "minItems": 2, "maxItems": 3} for number in range(5)]

    def ask(number: int) -> str | None:
        form = None if number % 4 == 3 else asked(schemas[number % len(schemas)])
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=60, seed=number, response_format=form
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(16)))
    for number, text in enumerate(found):
        options = dict(temperature=1.0, seed=number, max_new_tokens=60)
        schema = None if number % 4 == 3 else schemas[number % len(schemas)]
        assert text == lm.chat(ASKED, json_schema=schema, **options)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"response_format": asked({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": asked({"uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": asked(SCHEMA) | {"more": 1}}, "response_format", "Extra inputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format", "pattern"),
        ({"response_format": asked({"enum": ["x" * 70_000]})}, "response_format", "32,768"),
        ({"regex": "("}, "regex", "unclosed"),
        ({"grammar": "root ::= root"}, "grammar", "no token"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "exclude each other"),
    ],
)
def test_what_is_wrong_is_told_as_openai_tells_it(client, extra, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=3, extra_body=extra)
    assert caught.value.param == param and words in caught.value.message
    assert caught.value.type == "invalid_request_error" and "\n" not in caught.value.message


def test_a_model_without_an_end_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="no end token"):
        client.completions.create(model="endless", prompt="x", max_tokens=3, extra_body={"regex": "a"})


def test_an_answer_that_cannot_go_on_fails_alone(tmp_path):
    """A vocabulary of words has none for the second half; those beside it get their answers."""
    lm_of("wordpiece").save(tmp_path / "words")
    server = Running([str(tmp_path / "words")], limits=Limits(max_batch=4))
    client = server.client()

    def ask(regex: str) -> str:
        try:
            answer = client.completions.create(
                model="words", prompt="the fox", max_tokens=20, extra_body={"regex": regex}
            )
            return answer.choices[0].text
        except openai.BadRequestError as error:
            return error.message

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, ["the~", "the fox", "the~", "the quick"]))
    assert "cannot go on" in found[0] and "cannot go on" in found[2]
    assert (found[1], found[3]) == ("the fox", "the quick")
    server.stop()


def test_banned_runs_of_a_checkpoint_are_banned_by_the_server_too(folders, tmp_path):
    plain = sublayer.load(folders["tiny"])
    said = plain.generate_details("The quick", top=None, max_new_tokens=12)[0].ids
    plain.save(tmp_path / "banned")
    path = tmp_path / "banned" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bad_words_ids": [said[4:6]]}))
    banned = sublayer.load(tmp_path / "banned").generate_details("The quick", top=None, max_new_tokens=12)[0]
    assert banned.ids[:5] == said[:5] and banned.ids[5] != said[5]
    server = Running([str(tmp_path / "banned")])
    answer = server.client().completions.create(model="banned", prompt="The quick", max_tokens=12, temperature=0)
    assert answer.choices[0].text == banned.text
    server.stop()


def test_the_command_line(folders, tmp_path, capsys):
    model = str(folders["tiny"])
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "list.gbnf").write_text('root ::= "- " [a-c]{2} "\\n" root?')
    for schema in (str(tmp_path / "schema.json"), json.dumps(SCHEMA)):
        assert main(["generate", model, "Where?", "--json-schema", schema, "--max-new-tokens", "300"]) == 0
        jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    assert main(["generate", model, "x", "--regex", "[a-c]{4}"]) == 0
    assert re.fullmatch(r"[a-c]{4}\n", capsys.readouterr().out)
    assert main(["generate", model, "x", "--chat", "--grammar", str(tmp_path / "list.gbnf"), "--temperature", "1"]) == 0
    assert re.match(r"(- [a-c]{2}\n)+", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json-schema", "{"], "is not valid JSON"),
        (["--json-schema", "nowhere.json"], "nowhere.json cannot be read"),
        (["--json-schema", '{"type": 7}'], "json_schema cannot be followed"),
        (["--regex", "a", "--json-schema", "true"], "exclude each other"),
        (["--grammar", "nowhere.gbnf"], "nowhere.gbnf cannot be read"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(folders, arguments, words, capsys):
    with suppress(SystemExit):
        assert main(["generate", str(folders["tiny"]), "x", *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
