"""What happens when a checkpoint is not what it says: one clear line, and nothing half-loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from safetensors.torch import load_file, save_file
from tests.test_hub import VOCAB, answer, reference

import sublayer
from sublayer.hub import CheckpointError

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 20, "max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path):
    """A small LLaMA as transformers writes it."""
    config = transformers.LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=1)
    reference("LlamaForCausalLM", config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "DELETE"}))


def retensor(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refuses(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        sublayer.load_model(folder)
    text = str(error.value)
    assert "\n" not in text, text
    for word in words:
        assert word in text, text


def test_missing_extra_and_misshaped_tensors(folder):
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    retensor(folder, lambda t: t.pop(name))
    refuses(folder, name, "missing")
    retensor(folder, lambda t: (t.clear(), t.update(whole), t.update({"model.layers.7.extra": torch.zeros(2)})))
    refuses(folder, "model.layers.7.extra", "not part of this architecture")
    retensor(folder, lambda t: (t.clear(), t.update(whole), t.update({name: torch.zeros(3, 3)})))
    refuses(folder, "model.safetensors", name, "(3, 3)", "(20, 16)")
    retensor(folder, lambda t: (t.clear(), t.update(whole), t.update({name: torch.zeros(20, 16, dtype=torch.int32)})))
    refuses(folder, name, "floating point")
    whole[name][3, 4] = float("nan")
    retensor(folder, lambda t: (t.clear(), t.update(whole)))
    refuses(folder, "model.safetensors", name, "NaN")


def test_truncated_and_corrupt_files(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    refuses(folder, "model.safetensors", "not a whole safetensors file")
    path.write_bytes(b"")
    refuses(folder, "not a whole safetensors file")
    path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    refuses(folder, "not a whole safetensors file")
    path.write_bytes(data[:8] + b"[" + data[9:])
    refuses(folder, "not a whole safetensors file")
    path.unlink()
    refuses(folder, "holds no weights", "model.safetensors")


def test_broken_indexes(folder):
    model = sublayer.load_model(folder)
    sublayer.save_model(model, folder, max_shard_size=4000)
    first = min(path.name for path in folder.glob("model-*.safetensors"))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    assert len(set(good["weight_map"].values())) > 2
    assert not (folder / "model.safetensors").exists()
    again = sublayer.load_model(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for weight_map, words in (
        ({"a": "../../etc/passwd"}, ["plain file name"]),
        ({"a": index.name}, ["plain file name"]),
        ({"a": "model-9.safetensors"}, ["model-9.safetensors", "not there"]),
        ({"a": 3}, ["weight_map"]),
        ([], ["weight_map"]),
        ({"nothing": first}, ["lacks", "nothing"]),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refuses(folder, *words)
    index.write_text("{")
    refuses(folder, "index.json", "JSON")
    shard = next(iter(good["weight_map"].values()))
    index.write_text(json.dumps(good))
    (folder / shard).unlink()
    (folder / shard).symlink_to(folder / shard)
    refuses(folder, shard)


def test_configurations_that_describe_no_model(folder):
    good = json.loads((folder / "config.json").read_text())
    for changes, words in (
        ({"model_type": "llama4"}, ["llama4", "did you mean 'llama'"]),
        ({"model_type": None}, ["model_type", "bert"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForCausalLM"]),
        ({"architectures": "x"}, ["architectures"]),
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, ["auto_map", "never run"]),
        ({"hidden_size": "DELETE"}, ["hidden_size"]),
        ({"hidden_size": "16"}, ["d_model is '16'"]),
        ({"hidden_size": -1}, ["-1"]),
        ({"num_hidden_layers": 10**9}, ["1000000000 layers"]),
        ({"num_key_value_heads": 3}, ["3"]),
        ({"hidden_act": "tanhexp"}, ["tanhexp"]),
        ({"hidden_act": []}, ["activation"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["longrope"]),
        ({"rope_parameters": [1]}, ["rope"]),
        ({"vocab_size": 10**15}, ["shape"]),
    ):
        (folder / "config.json").write_text(json.dumps(good))
        edit(folder, **changes)
        refuses(folder, *words)
    for text in ("", "{", "[]", "null", '{"a":' * 2000):
        (folder / "config.json").write_text(text)
        refuses(folder, "config.json")


def test_paths_and_names(tmp_path, monkeypatch):
    refuses(tmp_path / "nowhere", "does not exist")
    refuses(tmp_path, "no config.json")
    (tmp_path / "file.txt").write_text("x")
    refuses(tmp_path / "file.txt", "is a file")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuses(Path("some-org/some-model"), "some-org/some-model", "could not be downloaded", "folder")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/sublayer-was-owned",))


def test_pickles_run_nothing(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert sublayer.load_model(folder)(torch.tensor([[3, 4]])).shape == (1, 2, VOCAB)
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    refuses(folder, "pytorch_model.bin", "refused")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refuses(folder, "pytorch_model.bin", "refused")
    assert not Path("/tmp/sublayer-was-owned").exists()


@given(st.randoms(use_true_random=False))
def test_fuzzed_safetensors_never_crash_and_never_look_fine(rng: random.Random):
    """Bits flipped in the header, or bytes cut: an error, or exactly the weights that the file then holds."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=1)
        reference("LlamaForCausalLM", config).save_pretrained(folder)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data))])
        try:
            model = sublayer.load_model(folder)
        except CheckpointError:
            return
        whole = load_file(path)
        assert torch.equal(model.decoder.embeddings.tokens.weight, whole["model.embed_tokens.weight"])


def test_a_failed_save_leaves_the_old_folder_whole(folder, monkeypatch):
    model = sublayer.load_model(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "notes.txt").write_text("mine")
    import safetensors.torch

    def full(*arguments, **keywords):
        Path(arguments[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with torch.no_grad():
        model.decoder.embeddings.tokens.weight.zero_()
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        sublayer.save_model(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "notes.txt"} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.undo()
    sublayer.save_model(model, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert float(sublayer.load_model(folder).decoder.embeddings.tokens.weight.abs().max()) == 0.0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_killed_in_the_middle_of_a_save(folder):
    """SIGKILL at any moment: the folder holds the old model or the new one, never a mixture."""
    code = (
        "import sublayer, sys, torch\n"
        f"model = sublayer.load_model({str(folder)!r})\n"
        "print('ready', flush=True)\n"
        "for n in range(100000):\n"
        "    for p in model.parameters(): p.data.fill_(n + 1.0)\n"
        f"    sublayer.save_model(model, {str(folder)!r}, max_shard_size=3000)\n"
    )
    first = [parameter.detach().clone() for parameter in sublayer.load_model(folder).parameters()]
    for wait in (0.03, 0.11, 0.2):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        now = [parameter.detach().clone() for parameter in sublayer.load_model(folder).parameters()]
        values = {float(v) for tensor in now for v in (tensor.min(), tensor.max())}
        untouched = all(torch.equal(a, b) for a, b in zip(now, first, strict=True))
        assert len(values) == 1 or untouched, values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_in_and_out(folder, dtype, tmp_path):
    expected = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    kind = getattr(torch, dtype)
    assert sublayer.load_model(folder).dtype == torch.float32
    model = sublayer.load_model(folder, dtype=dtype)
    assert model.dtype == kind
    assert torch.equal(model.decoder.blocks[0].feed_forward.sublayer.up.weight, expected.to(kind))
    sublayer.save_model(sublayer.load_model(folder), tmp_path / "cast", dtype=dtype)
    stored = load_file(tmp_path / "cast" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(stored, expected.to(kind))
    # float16 on a CPU is too slow to be what anyone wants.
    wanted = torch.float32 if dtype == "float16" else kind
    assert sublayer.load_model(tmp_path / "cast").dtype == wanted


def test_what_no_architecture_can_express_is_saved_in_our_own_form(tmp_path):
    from tests.support import model_of, random_ids, small

    model = model_of(small("gpt2", norm="rmsnorm", placement="deep", positions="rotary"))
    sublayer.save_model(model, tmp_path / "own", max_shard_size=20_000)
    again = sublayer.load_model(tmp_path / "own")
    assert again.config == model.config
    assert torch.equal(again(random_ids(2, 6)), model(random_ids(2, 6)))


# The traps: files that a naive reader loads without an error and then computes wrongly with.


def test_old_gpt2_files_carry_mask_buffers_and_bare_names(tmp_path):
    theirs = reference("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=VOCAB, n_embd=12, n_head=2, n_layer=2))
    theirs.save_pretrained(tmp_path)

    def old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 1024, 1024).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    retensor(tmp_path, old)
    ids = torch.randint(VOCAB, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(sublayer.load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_old_bert_files_call_norms_gamma_and_beta_and_carry_other_heads(tmp_path):
    theirs = reference("BertForMaskedLM", transformers.BertConfig(**SIZES))
    theirs.save_pretrained(tmp_path)

    def old(tensors):
        for name in list(tensors):
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[new] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
        tensors["cls.seq_relationship.weight"] = torch.zeros(2, 16)
        tensors["bert.pooler.dense.weight"] = torch.zeros(16, 16)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    retensor(tmp_path, old)
    ids = torch.randint(VOCAB, (2, 7))
    ours = sublayer.load_model(tmp_path)
    assert ours.config.tie_embeddings
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", [True, False])
def test_t5_that_says_tied_and_ships_two_matrices(tmp_path, flag):
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    reference("T5ForConditionalGeneration", config).save_pretrained(tmp_path)
    retensor(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(VOCAB, 16)}))
    edit(tmp_path, tie_word_embeddings=flag, scale_decoder_outputs=flag)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    ours = sublayer.load_model(tmp_path)
    assert not ours.config.tie_embeddings
    ids = torch.randint(VOCAB, (2, 7))
    with torch.no_grad():
        expected = answer(theirs(input_ids=ids, decoder_input_ids=ids))
        torch.testing.assert_close(ours(ids, ids), expected, rtol=1e-4, atol=1e-4)


def test_llama_configurations_of_transformers_4(tmp_path):
    """`rope_theta` and `rope_scaling` beside each other, inv_freq buffers, no head_dim."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope, bos_token_id=0, eos_token_id=1)
    theirs = reference("LlamaForCausalLM", config)
    theirs.save_pretrained(tmp_path)
    old = {key: value for key, value in rope.items() if key != "rope_theta"}
    edit(
        tmp_path, rope_parameters="DELETE", rope_theta=5e5, rope_scaling=old, torch_dtype="float32", dtype="DELETE",
        head_dim="DELETE", num_key_value_heads="DELETE",
    )  # fmt: skip
    retensor(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    ids = torch.randint(VOCAB, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(sublayer.load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_convert_command(folder, tmp_path, capsys):
    from sublayer.cli import main

    assert main(["convert", str(folder), str(tmp_path / "out"), "--dtype", "bfloat16", "--max-shard-size", "4KB"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "index.json" in out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert main(["convert", str(folder), str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["renamed"] == 21
    for arguments, words in (
        ([str(folder), str(folder)], "the source itself"),
        ([str(folder), str(tmp_path / "x"), "--dtype", "float17"], "did you mean 'float16'"),
        ([str(folder), str(tmp_path / "x"), "--max-shard-size", "big"], "5GB"),
        ([str(tmp_path / "none"), str(tmp_path / "x")], "does not exist"),
    ):
        assert main(["convert", *arguments]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert not (tmp_path / "x").exists()
