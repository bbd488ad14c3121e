"""GGUF files: against transformers' own reader, against the gguf library, and against damage."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
import transformers
from tests.support import model_of, small

from sublayer.config import ModelConfig, RotaryScaling
from sublayer.hub.gguf import GGUFCheckpoint, read_gguf
from sublayer.hub.gguf_tokenizer import tokenizer_from_gguf
from sublayer.hub.gguf_write import write_gguf
from sublayer.hub.load import load_model
from sublayer.hub.tensors import CheckpointError
from sublayer.models import build, materialize

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    attn_implementation="eager",
)  # fmt: skip


def model_from(checkpoint: GGUFCheckpoint) -> Any:
    tensors = checkpoint.tensors
    model = build(checkpoint.config, device="meta")

    def memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
        stored = tensors[name].load().to(tensor.dtype) if name in tensors else torch.empty_like(tensor, device="cpu")
        return stored.to(torch.get_default_device())

    materialize(model, memory)
    return model.eval()


def ids_for(model: Any) -> torch.Tensor:
    return torch.arange(2 * 11, device=model.device).view(2, 11) * 7 % model.config.vocab_size


def theirs_of(family: str, **changes: Any) -> Any:
    sizes = dict(SIZES) | changes
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


@torch.no_grad()
def round_to(dtype: str, model: Any) -> Any:
    """The model whose matrices are what a file of this type can hold: what is read must equal it, and not nearly."""
    kind = gguf.GGMLQuantizationType[dtype]
    for parameter in model.parameters():
        if parameter.dim() == 2:
            raw = gguf.quants.quantize(parameter.cpu().numpy(), kind)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
    return model


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "architecture"), [("Llama", "llama"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3")])
def test_written_file_is_the_same_model(tmp_path: Path, family: str, architecture: str, tied: bool, dtype: str) -> None:
    theirs = theirs_of(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "hf")
    model = load_model(tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(model, path, dtype=dtype, name="tiny")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["model.gguf"]

    reader = gguf.GGUFReader(path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert reader.fields["general.architecture"].contents() == architecture
    assert kinds["blk.0.attn_q.weight"] == dtype and kinds["blk.1.ffn_norm.weight"] == "F32"
    assert ("output.weight" in kinds) is not tied

    checkpoint = read_gguf(path)
    plain = dict(init="normal", init_std=0.02)
    assert dataclasses.replace(checkpoint.config, **plain) == dataclasses.replace(model.config, **plain)
    ids = ids_for(model)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "hf")(ids), theirs(ids).logits, atol=1e-5, rtol=1e-4)
        expected = round_to(dtype, theirs)(ids).logits
        torch.testing.assert_close(model_from(checkpoint)(ids), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(load_model(path, dtype="float32")(ids), model_from(checkpoint)(ids))


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_reads_what_we_write(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    """Somebody else's reader: the order of rotary dimensions in the file is the one that others expect."""
    # transformers ignores the key for the size of a head where the architecture is Qwen's.
    head_dim = {"Llama": 32, "Qwen2": 16, "Qwen3": 128}[family]
    theirs = theirs_of(family, tie_word_embeddings=tied, head_dim=head_dim)
    theirs.save_pretrained(tmp_path / "hf")
    write_gguf(load_model(tmp_path / "hf"), tmp_path / "model.gguf", dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = ids_for(load_model(tmp_path / "hf"))
    with torch.no_grad():
        expected = round_to(dtype, theirs)(ids).logits
        torch.testing.assert_close(again(ids).logits, expected, atol=1e-5, rtol=1e-4)
        ours = load_model(tmp_path / "model.gguf", dtype="float32")(ids)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        dict(attention_bias=True, attention_output_bias=True, ffn_bias=True),
        dict(window=5, eos_id=(1, 2, 3), head_dim=24),
        dict(rotary_scaling=RotaryScaling(kind="linear", factor=4.0)),
        dict(rotary_scaling=RotaryScaling(kind="yarn", factor=4.0, original_max_positions=32, beta_fast=16.0)),
        dict(rotary_scaling=RotaryScaling(kind="yarn", factor=2.0, original_max_positions=32, attention_factor=1.5)),
        dict(rotary_scaling=RotaryScaling(kind="llama3", factor=8.0, original_max_positions=8192), rotary_base=5e5),
        dict(rotary_scaling=RotaryScaling(kind="llama3", factor=32.0, original_max_positions=64)),
    ],
)
def test_every_choice_survives(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small("llama-7b", **(dict(head_dim=16) | changes))
    model = model_of(config)
    write_gguf(model, tmp_path / "model.gguf", dtype="F32")
    again = model_from(read_gguf(tmp_path / "model.gguf"))
    assert again.config.window == config.window and again.config.eos_id == config.eos_id
    ids = ids_for(model)
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt2", {}, "norm"),
        ("llama-7b", dict(activation="gelu"), "activation"),
        ("llama-7b", dict(embedding_scale=True), "embedding_scale"),
        ("llama-7b", dict(window=4, window_layers=(1,)), "window_layers"),
        ("llama-7b", dict(rotary_scaling=RotaryScaling(kind="dynamic", factor=2.0)), "rotary scaling"),
        ("qwen3-0.6b", dict(attention_bias=True), "attention_bias"),
        ("llama-7b", dict(head="none"), "head"),
    ],
)
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        write_gguf(model_of(small(name, **changes)), tmp_path / "model.gguf")
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", model_of(small("llama-7b"))
    write_gguf(model, path)
    before = path.read_bytes()
    with torch.no_grad():
        model.decoder.blocks[1].feed_forward.sublayer.down.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="beyond the range of F16"):
        write_gguf(model, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="unknown GGUF type"):
        write_gguf(model, path, dtype="Q2_K")


# Quantised types


def random_blocks(kind: Any, rows: int, width: int) -> Any:
    """Bytes that are a matrix of this type: random, but for scales that are small finite numbers."""
    import numpy as np

    generator = np.random.default_rng(0)
    if kind.name in ("Q8_0", "Q4_0", "Q4_1", "F16", "F32"):
        return gguf.quants.quantize(generator.standard_normal((rows, width), dtype=np.float32), kind)
    if kind.name == "BF16":
        return torch.randn(rows, width, device="cpu").bfloat16().view(torch.uint8).numpy()
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * width // block, size), dtype=np.uint8)
    scales = generator.uniform(0.001, 0.1, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q4_K":
        blocks[:, :4] = scales  # the scale and the smallest value come first
    else:
        blocks[:, -2:] = scales[:, :2]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_ranges_of_quantised_tensors(tmp_path: Path, name: str) -> None:
    """Any range of elements equals that of the whole matrix as the gguf library sees it."""
    kind = gguf.GGMLQuantizationType[name]
    config = small("llama-7b", d_model=256, num_heads=2, num_decoder_layers=1, d_ff=40)
    raw = {"blk.0.ffn_up.weight": random_blocks(kind, 40, 256), "blk.0.attn_q.weight": random_blocks(kind, 256, 256)}
    path = tmp_path / "model.gguf"
    rewrite(model_of(config), path, {stored: (data, kind) for stored, data in raw.items()})
    tensors = read_gguf(path).tensors
    whole = {stored: torch.from_numpy(gguf.quants.dequantize(data, kind)) for stored, data in raw.items()}
    # Two heads: rows of the file are pairs of neighbours, rows of ours two halves.
    query = whole["blk.0.attn_q.weight"].view(2, 64, 2, 256).transpose(1, 2).reshape(256, 256)
    for part, expected in (
        ("feed_forward.sublayer.up", whole["blk.0.ffn_up.weight"]),
        ("attention.sublayer.query", query),
    ):
        stored = tensors[f"decoder.blocks.0.{part}.weight"]
        assert stored.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
        assert torch.equal(stored.load().float(), expected)
        flat, total = expected.reshape(-1), expected.numel()
        for start, stop in ((0, 1), (5, 300), (255, 257), (256, 512), (total - 700, total), (3, total - 3)):
            into = torch.empty(stop - start, dtype=stored.dtype, device="cpu")
            stored.read(start, stop, into)
            assert torch.equal(into.float(), flat[start:stop]), (start, stop)


def rewrite(model: Any, path: Path, replaced: dict[str, Any], drop: tuple[str, ...] = (), **keys: Any) -> None:
    """A file of this model with some tensors (bytes and type) and keys (value) other than ours would be."""
    write_gguf(model, path, dtype="F32")
    reader = gguf.GGUFReader(path)
    architecture = keys.pop("architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in drop:
            continue
        writer.add_key_value(key, keys.pop(key, field.contents()), field.types[0])
    for key, value in keys.items():
        kind = {str: "STRING", int: "UINT32", float: "FLOAT32", list: "ARRAY"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for tensor in reader.tensors:
        if tensor.name not in drop:
            data, kind = replaced.get(tensor.name, (tensor.data, tensor.tensor_type))
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name in replaced.keys() - {tensor.name for tensor in reader.tensors}:
        writer.add_tensor(name, replaced[name][0], raw_dtype=replaced[name][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


# Files that are not what they should be


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(architecture="mamba"), "'mamba'.*llama, qwen2, qwen3"),
        ({"drop": ("llama.block_count",)}, "lacks the key 'llama.block_count'"),
        ({"drop": ("blk.1.ffn_down.weight",)}, "lacks the tensor 'blk.1.ffn_down.weight'"),
        ({"drop": ("token_embd.weight",)}, "lacks the tensor 'token_embd.weight'"),
        ({"llama.embedding_length": 64}, "blk.0.attn_q.weight"),
        ({"llama.feed_forward_length": 47}, "ffn_gate.weight.*shape"),
        ({"llama.block_count": 2**31}, "layers"),
        ({"llama.attention.head_count": 0}, "heads"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.freq_base": float("nan")}, "rope keys"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "norm_eps"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id"),
        ({"general.alignment": 3}, "alignment|Invalid"),
        ({"split.count": 4}, "split"),
    ],
)
def test_wrong_metadata_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "model.gguf"
    rewrite(model_of(small("llama-7b", head_dim=8)), path, {}, **changes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    import numpy as np

    path, model, kinds = tmp_path / "model.gguf", model_of(small("llama-7b", d_model=256)), gguf.GGMLQuantizationType
    for name, data, kind, reason in (
        ("blk.0.ffn_up.weight", np.zeros((48, 84), np.uint8), kinds.Q2_K, "blk.0.ffn_up.weight.*Q2_K.*Q4_K"),
        ("rope_freqs.weight", np.linspace(1, 3, 32, dtype=np.float32), kinds.F32, "rope_freqs.weight"),
        ("blk.0.exotic.weight", np.zeros(3, np.float32), kinds.F32, "blk.0.exotic.weight"),
    ):
        rewrite(model, path, {name: (data, kind)})
        with pytest.raises(CheckpointError, match=reason):
            read_gguf(path)
    rewrite(model, path, {"output_norm.weight": (np.full(256, np.nan, np.float32), kinds.F32)})
    with pytest.raises(CheckpointError, match=r"output_norm.weight.*NaN"):
        model_from(read_gguf(path))


def read_all(path: Path) -> None:
    """Everything a damaged file could break: the only error is ours, in one line."""
    try:
        checkpoint = read_gguf(path)
        model_from(checkpoint)
        if "tokenizer.ggml.tokens" in checkpoint.metadata:
            tokenizer_from_gguf(checkpoint.metadata).encode("some text")
    except CheckpointError as error:
        if "\n" in str(error):
            raise


def damaged_source(tmp_path: Path) -> tuple[Path, bytes, int]:
    path = tmp_path / "model.gguf"
    config = small("llama-7b", d_model=8, num_heads=2, head_dim=4, d_ff=8, num_decoder_layers=1, vocab_size=300)
    write_gguf(model_of(config), path, tokenizer_json=byte_level(tmp_path))
    return path, path.read_bytes(), gguf.GGUFReader(path).data_offset


def test_truncated_files(tmp_path: Path) -> None:
    path, data, _ = damaged_source(tmp_path)
    read_all(path)
    for length in [*range(64), *range(64, len(data), 61), len(data) - 33]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
        assert str(path) in str(caught.value)


def test_flipped_bits(tmp_path: Path) -> None:
    path, data, header = damaged_source(tmp_path)
    bits = torch.randint(0, header * 8, (600,), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    for bit in [*range(24 * 8), *bits]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        read_all(path)


def test_lying_counts_neither_hang_nor_reserve(tmp_path: Path) -> None:
    """Arrays and headers of 2^60 entries that are not there; the gguf library's own reader never ends on these."""
    path = tmp_path / "model.gguf"
    key = struct.pack("<Q", 1) + b"k"
    array = [struct.pack("<IIQ", 9, kind, 2**60) for kind in (0, 4, 8, 9)]
    for body in (*(key + value for value in array), key + struct.pack("<IQ", 8, 2**63), b"", key):
        for counts in ((0, 1), (0, 2**60), (2**60, 0)):
            path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
            with pytest.raises(CheckpointError, match=r"model\.gguf"):
                read_gguf(path)
    for start in (b"", b"GG", b"GGML", b"GGUF\x01\0\0\0", b"GGUF\0\0\0\x03" + bytes(16), b"PK\x03\x04" + bytes(64)):
        path.write_bytes(start)
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read_gguf(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path / "absent.gguf")


# Tokenizers

TEXTS = (
    "Hello, world!", "", "  two  spaces and\ttabs\n\nand lines \r\n", "naïve café 東京 🙂‍↔️ \u0301",
    "it's 12345.678 don't WE'LL x=y+z $5 <tag>", "<|user|> hi <|end|>there <think>so</think>", " ",
)  # fmt: skip


def byte_level(folder: Path, pre: str = "gpt-2", bos: bool = False) -> Path:
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

    from sublayer.hub.gguf_tokenizer import pre_tokenizer

    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizer(tokenizers, pre)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|user|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 0)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_byte_level_tokenizer_comes_back(tmp_path: Path, pre: str, bos: bool) -> None:
    import tokenizers

    before = tokenizers.Tokenizer.from_file(str(byte_level(tmp_path, pre, bos)))
    config = small("llama-7b", vocab_size=300, bos_id=0, eos_id=1)
    write_gguf(model_of(config), tmp_path / "model.gguf", tokenizer_json=tmp_path / "tokenizer.json")
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == pre and len(metadata["tokenizer.ggml.tokens"]) == 300
    after = tokenizer_from_gguf(metadata)
    for text in TEXTS:
        ids = before.encode(text).ids
        assert after.encode(text).ids == ids
        for skip in (False, True):
            assert after.decode(ids, skip_special_tokens=skip) == before.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Built from pieces and scores as converters write them; the ids are those of SentencePiece itself."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=600, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    numbers = range(model.vocab_size())
    kinds = [2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1 for n in numbers]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in numbers],
        "tokenizer.ggml.scores": [model.get_score(n) for n in numbers],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
    }
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("Hello, world!", "  two  spaces", "naïve café 東京 🙂", "def f(x):\n    return x ", "it's 12345"):
        ids = [model.bos_id(), *model.encode(text)]
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == text
    bare = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert not bare.encode("a b").tokens[1].startswith("▁") and tokenizer.encode("a b").tokens[1].startswith("▁")
    assert bare.decode(bare.encode(" a b").ids) == " a b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert.*gpt2, llama"),
        ({"tokenizer.ggml.pre": "exotic"}, "exotic"),
        ({"tokenizer.ggml.tokens": ["a", 1]}, "tokens"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges"),
        ({"tokenizer.ggml.merges": ["a z"]}, "cannot be built"),
        ({"tokenizer.ggml.token_type": [1]}, "types"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9}, "bos_token_id"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_wrong_tokenizers_are_refused(changes: dict[str, Any], reason: str) -> None:
    good = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    good |= {"tokenizer.ggml.merges": ["a b"]}
    assert tokenizer_from_gguf(good).encode("ab").ids == [2]
    with pytest.raises(CheckpointError, match=reason):
        tokenizer_from_gguf(good | changes)


def test_tokenizers_that_gguf_cannot_say(tmp_path: Path) -> None:
    import tokenizers

    model = model_of(small("llama-7b", vocab_size=300))
    path = byte_level(tmp_path)
    for change, reason in (
        (dict(normalizer=tokenizers.normalizers.Lowercase()), "normalises"),
        (dict(pre_tokenizer=tokenizers.pre_tokenizers.Whitespace()), "no name"),
        (dict(decoder=tokenizers.decoders.WordPiece()), "byte-level"),
    ):
        other = tokenizers.Tokenizer.from_file(str(path))
        for key, value in change.items():
            setattr(other, key, value)
        other.save(str(tmp_path / "other.json"))
        with pytest.raises(CheckpointError, match=reason):
            write_gguf(model, tmp_path / "model.gguf", tokenizer_json=tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="outside the model's vocabulary"):
        write_gguf(model_of(small("llama-7b")), tmp_path / "model.gguf", tokenizer_json=path)
    assert not (tmp_path / "model.gguf").exists()


def test_config_is_a_model_config(tmp_path: Path) -> None:
    write_gguf(model_of(small("llama-7b")), tmp_path / "model.gguf", name="a name")
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert isinstance(checkpoint.config, ModelConfig)
    assert checkpoint.metadata["general.name"] == "a name"
    assert checkpoint.metadata["tokenizer.ggml.model"] == "no_vocab"
