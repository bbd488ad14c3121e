"""What a server must live with: wrong requests, nonsense, clients that break off, and many of them at once."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from benchmarks.load import KINDS, Process, fuzz, run

from sublayer.serving import Limits
from support_serving import Running

GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 1}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ["a"] * 100_000}, "at most"),
    ({"prompt": ""}, "no tokens"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": [9**30]}, "prompt"),
    ({"prompt": [258]}, "token 258"), ({"prompt": "a" * 1300}, "1300 tokens"), ({"max_tokens": 1250}, "do not fit"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 10**40}, ""),
    ({"temperature": -1}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"seed": 2**63}, "seed"), ({"n": 0}, "n:"), ({"n": 100}, "at most"), ({"stop": [""]}, "stop"),
    ({"stop": list("abcde")}, "at most 4"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "token 999"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logprobs": 9}, "logprobs"),
    ({"echo": True}, "echo is not supported"), ({"echo": 0}, "echo is not supported"),
    ({"temprature": 1}, "temperature"), ({"model": 5}, "model"),
    ({"stream_options": 3}, "stream_options"), ({"model": "vectors"}, "embeddings only"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_requests_are_told_what_is_wrong(server, change, message):
    answer = httpx.post(f"{server.address}/v1/completions", json=GOOD | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","prompt":"a","temperature":NaN}', b'{"model":"tiny","prompt":"a","top_p":1e999}',
        b'{"model":"tiny"}', b'{"model":"tiny","messages":[]}', b'{"model":"tiny","messages":[{"role":"user"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url","image_url":"file:///etc/passwd"}]}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"top_logprobs":2}',
        b'{"model":"endless","messages":[{"role":"user","content":"a"}]}',
        b'{"model":"tiny","input":"a"}', b'{"model":"vectors","input":[]}',
        b'{"model":"vectors","input":"' + b"a" * 99 + b'"}',
        b'{"model":"vectors","input":"a","dimensions":3}', b'{"model":"vectors","input":[1,2]}',
    ],
)  # fmt: skip
def test_nonsense_is_never_a_failure_of_the_server(server, body):
    for path in ("completions", "chat/completions", "embeddings"):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.address}/v1/{path}", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_other_ways_to_be_wrong(server, client):
    url = f"{server.address}/v1/completions"
    with pytest.raises(openai.NotFoundError) as lost:
        client.completions.create(model="../tiny", prompt="a")
    assert lost.value.code == "model_not_found"
    assert httpx.post(url, data={"model": "tiny"}).status_code == 415
    large = httpx.post(url, json=GOOD | {"prompt": "a" * (1 << 20)})
    assert large.status_code == 413 and "1 MB" in large.json()["error"]["message"]
    other = httpx.get(url)
    assert other.status_code == 405 and other.headers["allow"] == "POST"
    assert "error" in httpx.get(f"{server.address}/v1/nothing").json()
    assert httpx.get(f"{server.address}/docs").status_code == 404
    assert "access-control-allow-origin" not in httpx.get(f"{server.address}/health", headers={"Origin": "x"}).headers


def post(server: Running, body: bytes, length: int | None = None, kind: str = "Content-Length") -> socket.socket:
    """A question over a plain socket, which may say another length than it has."""
    raw = socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])), timeout=20)
    size = f"{kind}: {'chunked' if kind == 'Transfer-Encoding' else length or len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def test_clients_that_break_off_a_question_are_no_failures(server, client, log):
    """One goes away in the middle of it, another one's is no HTTP; there is nothing to tell of either."""
    post(server, b'{"model"', 500).close()
    with post(server, b"zz\r\n", kind="Transfer-Encoding") as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    client.completions.create(**GOOD)
    assert not [record for record in log if record.exc_info]


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """What uvicorn has to say."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    yield records
    logging.getLogger("uvicorn.error").removeHandler(handler)


def test_a_question_that_never_ends_is_given_up(folders):
    server = Running([f"m={folders['tiny']}"], timeout=0.2)
    with post(server, b'{"model"', 500) as raw:
        answer = b"".join(iter(lambda: raw.recv(1000), b""))  # to the end: the server hangs up
    assert answer.startswith(b"HTTP/1.1 408") and b"0.2 seconds" in answer
    server.stop()


def test_openapi_says_what_is_served(server):
    page = httpx.get(f"{server.address}/openapi.json").json()
    assert page["openapi"] == "3.2.0" and "securitySchemes" not in page["components"]
    schemas = page["components"]["schemas"]
    assert set(schemas["CompletionBody"]["properties"]["model"]["enum"]) == {"tiny", "endless", "pairs"}
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["tiny"]
    assert schemas["EmbeddingBody"]["properties"]["model"]["enum"] == ["vectors"]
    assert schemas["CompletionBody"]["properties"]["echo"]["enum"] == [None, False]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_whole_and_in_pieces_are_as_openapi_says(server, path):
    components = httpx.get(f"{server.address}/openapi.json").json()["components"]
    chat = "chat" in path
    body = {"model": "tiny", "max_tokens": 9, "n": 2}
    body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2} if chat else {}
    body |= {} if chat else {"prompt": ["a", "b"], "logprobs": 2}
    whole = httpx.post(server.address + path, json=body).json()
    streamed = httpx.post(
        server.address + path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    events = [event.removeprefix("data: ") for event in streamed.text.split("\n\n") if event]
    assert events.pop() == "[DONE]" and len(events) > 4
    name = "ChatCompletion" if chat else "Completion"
    for kind, answers in ((name, [whole]), (f"{name}Chunk", [json.loads(event) for event in events])):
        schema = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{kind}", "components": components})
        for answer in answers:
            schema.validate(answer)
            with pytest.raises(jsonschema_rs.ValidationError):
                schema.validate(answer | {"more": 1})


def keeps_to_its_openapi(folders: dict[str, Path], tmp_path: Path, *limit: str) -> str:
    """Schemathesis asks for what the page says and for what it forbids, and reads the answers by it."""
    limits = Limits(max_batch=4, max_tokens_cached=256)  # short answers
    server = Running([*map(str, folders.values())], limits=limits, api_key="k 1")
    done = fuzz(int(server.address.rsplit(":", 1)[1]), "k 1", 1, tmp_path, *limit)
    server.stop()
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_a_little_fuzzing(folders, tmp_path):
    assert " generated, " in keeps_to_its_openapi(folders, tmp_path, "--max-time", "12")


@pytest.mark.slow
def test_fuzzing_of_all_that_the_page_says(folders, tmp_path):
    assert "Tested: 7" in keeps_to_its_openapi(folders, tmp_path, "--max-examples", "20")


def test_a_server_under_load():
    """All that the ten minutes of benchmarks.load do, for a few seconds."""
    report = run(0.15, clients=len(KINDS))
    assert report.faults == []
    assert {kind for kind, _ in report.counts} == set(KINDS)
    assert report.counts["ask", "200"] > 20 and report.counts["hang_up", "in the answer"] > 5


def test_the_line_that_says_where_it_listens_is_true(folders, tmp_path):
    """Whoever reads it can connect at once."""
    process = Process([str(folders["tiny"])], tmp_path / "stderr")
    socket.create_connection(("127.0.0.1", process.port), timeout=20).close()
    process.stop()
    assert "Traceback" not in process.errors.read_text()
