"""The server as its clients meet it: through OpenAI's own package, over a socket."""

from __future__ import annotations

import base64
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import sublayer
from sublayer.lm import LM
from sublayer.serving import Limits, named, serve
from support_serving import PROMPTS, Running


@pytest.fixture(scope="module")
def lm(folders: dict[str, Path]) -> LM:
    return sublayer.load(folders["tiny"])


def test_completions_equal_generate(client, lm):
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=20, temperature=0)
    assert [choice.text for choice in answer.choices] == lm.generate(PROMPTS, max_new_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    rows = lm.generate_details(PROMPTS, max_new_tokens=20, top=None)
    assert [choice.finish_reason for choice in answer.choices] == [row.finish_reason for row in rows]
    assert answer.usage.completion_tokens == sum(len(row.ids) for row in rows)
    assert answer.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.3, seed=5),
        dict(temperature=0.7, top_p=0.9, seed=6, frequency_penalty=0.5, presence_penalty=-0.5),
        dict(temperature=0, logit_bias={40: 5.0, 50: -100.0}),
    ],
)
def test_options_mean_what_they_mean_in_generate(client, lm, options):
    answer = client.completions.create(model="tiny", prompt="The fox", max_tokens=24, **options)
    assert answer.choices[0].text == lm.generate("The fox", max_new_tokens=24, **options)


def test_ids_are_a_prompt_too(client, lm):
    ids = [lm.tokenizer.encode(prompt) for prompt in PROMPTS]
    both = [client.completions.create(model="tiny", prompt=one, max_tokens=9, temperature=0) for one in (ids, PROMPTS)]
    assert [c.text for c in both[0].choices] == [c.text for c in both[1].choices]
    single = client.completions.create(model="tiny", prompt=ids[0], max_tokens=9, temperature=0)
    assert single.choices[0].text == both[0].choices[0].text


def test_a_stream_is_the_answer_in_pieces(client):
    wish = dict(model="tiny", prompt=PROMPTS, max_tokens=25, temperature=1.5, seed=2, n=2, logprobs=2)
    whole = client.completions.create(**wish)
    assert len(whole.choices) == 8
    texts, tokens, reasons, usage = [""] * 8, [[] for _ in range(8)], [None] * 8, None
    for chunk in client.completions.create(**wish, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    for mine, choice in zip(tokens, whole.choices, strict=True):
        assert mine == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    # The answers to one prompt are drawn apart, and the first is the one of the seed itself.
    assert texts[0] != texts[1]
    alone = client.completions.create(**wish | {"n": 1, "prompt": PROMPTS[0]})
    assert alone.choices[0].text == texts[0]


def test_the_wire_carries_events_and_an_end(server):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


def test_chat_reads_what_the_template_writes(client, lm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "今天?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=18, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == lm.chat(messages, max_new_tokens=18)
    assert answer.usage.prompt_tokens == len("system: Be brief.\nuser: 今天?\nassistant:".encode())
    pieces = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=18,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage and chunks[-1].choices == []
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == answer.choices[0].finish_reason
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=18, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_logprobs_of_a_chat(client, lm):
    messages = [{"role": "user", "content": "Hi"}]
    wish = dict(model="tiny", messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3)
    told = client.chat.completions.create(**wish).choices[0].logprobs.content
    detail = lm.chat_details(messages, max_new_tokens=8, top=3)
    kept = detail.ids[:-1] if detail.finish_reason == "stop" else detail.ids  # the end is no part of the text
    assert [one.logprob for one in told] == pytest.approx(detail.logprobs[: len(kept)], abs=1e-4)
    assert [one.token for one in told] == [lm.tokenizer.decode([number], skip_special=False) for number in kept]
    for one, best in zip(told, detail.top, strict=False):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([value for _, value in best], abs=1e-4)
    assert all(one.bytes == list(one.token.encode()) for one in told if "�" not in one.token)


def test_stop_strings_cut_the_answer(client, lm):
    whole = lm.generate("The fox", max_new_tokens=40, temperature=1.0, seed=1)
    wish = dict(model="tiny", prompt="The fox", max_tokens=40, temperature=1.0, seed=1)
    for stop in (whole[10:12], ["never in it", whole[5:8], whole[20]]):
        answer = client.completions.create(**wish, stop=stop)
        assert answer.choices[0].text == lm.generate("The fox", max_new_tokens=40, temperature=1.0, seed=1, stop=stop)
        assert answer.choices[0].finish_reason == "stop"
        pieces = client.completions.create(**wish, stop=stop, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_sixteen_clients_at_once_get_what_they_get_alone(server, lm):
    def options(number: int) -> dict[str, Any]:
        return dict(temperature=0.0 if number % 2 else 1.1, seed=number)

    prompts = [PROMPTS[number % 4] * (1 + number) for number in range(16)]
    alone = [lm.generate(p, max_new_tokens=10 + n, **options(n)) for n, p in enumerate(prompts)]

    def ask(number: int) -> str:
        wish = dict(model="tiny", prompt=prompts[number], max_tokens=10 + number, **options(number))
        with server.client() as client:
            if number % 3:
                return client.completions.create(**wish).choices[0].text
            return "".join(piece.choices[0].text for piece in client.completions.create(**wish, stream=True))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_encoder_decoders_answer_in_batches(client, folders):
    lm = sublayer.load(folders["pairs"])
    answer = client.completions.create(model="pairs", prompt=PROMPTS, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == lm.generate(PROMPTS, max_new_tokens=12)
    drawn = client.completions.create(model="pairs", prompt=PROMPTS, max_tokens=12, temperature=1, seed=3, stream=True)
    texts = [""] * 4
    for chunk in drawn:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [lm.generate(prompt, max_new_tokens=12, temperature=1.0, seed=3) for prompt in PROMPTS]
    told = client.completions.create(model="pairs", prompt=PROMPTS[0], max_tokens=12, temperature=0, logprobs=2)
    (detail,) = lm.generate_details([PROMPTS[0]], max_new_tokens=12, top=2)
    assert told.choices[0].text == detail.text
    kept = told.choices[0].logprobs.token_logprobs  # the end is no part of the text
    assert kept and kept == pytest.approx(detail.logprobs[: len(kept)], abs=1e-4)


def test_embeddings(client, folders, server):
    expected = sublayer.load(folders["vectors"]).embed(PROMPTS)
    answer = client.embeddings.create(model="vectors", input=PROMPTS)  # the client asks for base64 by itself
    torch.testing.assert_close(torch.tensor([row.embedding for row in answer.data]), expected, atol=1e-5, rtol=0)
    assert answer.usage.prompt_tokens == sum(len(prompt.encode()) + 1 for prompt in PROMPTS)
    many = client.embeddings.create(model="vectors", input=PROMPTS * 10)  # more than there are places
    got = torch.tensor([row.embedding for row in many.data])
    torch.testing.assert_close(got, expected.repeat(10, 1), atol=1e-5, rtol=0)
    url = f"{server.address}/v1/embeddings"
    plain = httpx.post(url, json={"model": "vectors", "input": "dog"}).json()["data"][0]["embedding"]
    packed = httpx.post(url, json={"model": "vectors", "input": "dog", "encoding_format": "base64"}).json()
    numbers = struct.unpack(f"<{len(plain)}f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(numbers) == pytest.approx(plain, abs=1e-6)


def test_models(client, folders):
    assert {model.id for model in client.models.list()} == set(folders)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_place(server, streamed):
    body = {"model": "endless", "prompt": "a", "max_tokens": 1450, "stream": streamed}
    server.slow("endless")
    server.until('sublayer_running{model="endless"}', 0)
    made = 'sublayer_generated_tokens_total{model="endless"}'
    gone = 'sublayer_requests_total{ended="cancelled",model="endless"}'
    before = server.number(gone) if gone in httpx.get(f"{server.address}/metrics").text else 0
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as raw:
        text = json.dumps(body)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        )
        raw.sendall(f"{head}\r\n\r\n{text}".encode())
        server.until('sublayer_running{model="endless"}', 1)
    server.until('sublayer_running{model="endless"}', 0)
    assert server.number(gone) == before + 1
    assert server.number('sublayer_cached_tokens{model="endless"}') == 0
    assert server.number(made) < 2 * 1450


def test_a_full_queue_says_so_and_when_to_come_again(folders):
    server = Running([str(folders["endless"])], limits=Limits(max_batch=1, queue=1))
    server.slow("endless")
    wish = dict(model="endless", prompt="a", max_tokens=1400, stream=True)
    client = server.client()
    streams = [client.completions.create(**wish)]
    server.until('sublayer_running{model="endless"}', 1)
    streams.append(client.completions.create(**wish))
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(**wish | {"stream": False})
    assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
    assert server.number('sublayer_rejected_total{model="endless"}') == 1
    with pytest.raises(openai.BadRequestError, match="at most 2"):
        client.completions.create(**wish | {"stream": False, "n": 3})
    for stream in streams:
        stream.close()
    server.until('sublayer_waiting{model="endless"}', 0)
    server.until('sublayer_running{model="endless"}', 0)
    server.stop()


def test_a_deadline_is_an_error(folders):
    server = Running([str(folders["endless"])], timeout=0.15)
    server.slow("endless")
    client = server.client()
    with pytest.raises(openai.APIStatusError) as late:
        client.completions.create(model="endless", prompt="a", max_tokens=1400)
    assert late.value.status_code == 504 and late.value.code == "timeout"
    with pytest.raises(openai.APIError, match="longer than this server allows"):
        list(client.completions.create(model="endless", prompt="a", max_tokens=1400, stream=True))
    server.stop()


def test_shutdown_finishes_what_runs(folders):
    server = Running([str(folders["endless"])], limits=Limits(max_batch=1))
    server.slow("endless")
    client = server.client()
    stream = client.completions.create(model="endless", prompt="a", max_tokens=300, temperature=0, stream=True)
    server.until('sublayer_running{model="endless"}', 1)  # its first bytes may be no character yet
    waiting = ThreadPoolExecutor(1).submit(client.completions.create, model="endless", prompt="b", max_tokens=3)
    server.until('sublayer_waiting{model="endless"}', 1)
    server.server.should_exit = True
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    expected = sublayer.load(folders["endless"]).generate("a", max_new_tokens=300)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        waiting.result(20)
    server.stop()


def test_the_key_is_asked_for(folders, monkeypatch):
    monkeypatch.setenv("SUBLAYER_API_KEY", "geheim 钥")
    server = Running([f"mine={folders['tiny']}"])
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert httpx.get(server.address + path).status_code == 401
        wrong = httpx.get(server.address + path, headers={"Authorization": "Bearer geheim"})
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer geheim 钥".encode()}
        assert httpx.get(server.address + path, headers=right).status_code == 200
    assert httpx.post(f"{server.address}/v1/completions", json={}).status_code == 401
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
    server.stop()


def test_metrics_count(folders):
    server = Running([f"m={folders['tiny']}"])
    answers = [server.client().completions.create(model="m", prompt="abc", max_tokens=n, temperature=0) for n in (1, 4)]
    made = sum(answer.usage.completion_tokens for answer in answers)
    assert server.number('sublayer_prompt_tokens_total{model="m"}') == 6
    assert server.number('sublayer_generated_tokens_total{model="m"}') == made
    assert server.number('sublayer_steps_total{model="m"}') == made - 2  # the first token comes from the prompt
    assert server.number('sublayer_request_seconds_count{model="m"}') == 2
    assert server.number('sublayer_first_token_seconds_bucket{model="m",le="+Inf"}') == 2
    assert server.number('sublayer_slots{model="m"}') == 16
    server.stop()


def test_names_of_models(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert named([str(tmp_path / "a=b"), "x=runs/y", "org/name"]) == {
        "a=b": str(tmp_path / "a=b"), "x": "runs/y", "name": "org/name",
    }  # fmt: skip
    for wrong in (["a", "b/a"], ["=a"], ["a="], []):
        with pytest.raises(ValueError, match=r"name|model"):
            named(wrong)


def test_what_cannot_be_served_is_one_line(folders, tmp_path, capsys):
    from sublayer.cli import main

    assert main(["serve", str(tmp_path / "nothing")]) == 1
    assert main(["serve", str(folders["tiny"]), "--max-batch", "0"]) == 1
    assert main(["serve", str(folders["tiny"]), "--timeout", "nan"]) == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(folders["tiny"]), "--port", str(taken.getsockname()[1])]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("sublayer: ")] == []
    assert len(lines) == 4 and "cannot listen" in lines[3]
    with pytest.raises(ValueError, match="another --port"):
        serve([str(folders["tiny"])], port=70_000)
