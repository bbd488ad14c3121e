"""A LLaMA-like decoder written as a GGUF file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig, unknown
from ..models import Model
from .gguf import FIXED, interleaved, llama3_factors, rules_of, yarn_magnitude
from .gguf_file import PLAIN, library
from .rules import Rule

WRITTEN = ("F32", "F16", "BF16", "Q8_0")


def write_gguf(
    model: Model, path: Path, *, dtype: str = "F16", tokenizer_json: Path | None = None, name: str = ""
) -> None:
    """A LLaMA-like decoder as a GGUF file, whole or not at all, holding about one tensor at a time.

    Vectors stay float32. So that llama.cpp can take text, give the tokenizer.json that belongs to the model.
    """
    gguf = library()
    if dtype not in WRITTEN:
        raise ValueError(unknown("GGUF type", dtype, WRITTEN))
    config = model.config
    architecture = _architecture(config)
    weights = dict(model.named_parameters(remove_duplicate=False))
    rules = rules_of(config)
    extra = set(weights) - {rule.ours[0] for rule in rules} - {"head.logits.weight"}
    if extra:
        raise ValueError(f"the model has a parameter {min(extra)!r}, for which a GGUF file has no place")
    if any(weight.is_meta for weight in weights.values()):
        raise ValueError("the model is on the meta device and holds no weights to write")
    metadata = {"general.type": "model", "general.name": name, **_metadata(config, architecture)}
    metadata["general.file_type"] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[dtype]
    if tokenizer_json is None:
        metadata["tokenizer.ggml.model"] = "no_vocab"
    else:
        from .gguf_tokenizer import tokenizer_to_gguf

        metadata |= tokenizer_to_gguf(tokenizer_json, config)

    def tensor(rule: Rule) -> Tensor:
        weight = weights[rule.ours[0]].detach().to("cpu", torch.float32)
        order = interleaved(config, rule.stored) if architecture == "llama" else None
        return weight if order is None else weight[order]

    steps: list[tuple[str, tuple[int, ...], Callable[[], Tensor]]] = [
        (rule.stored, tuple(weights[rule.ours[0]].shape), partial(tensor, rule)) for rule in rules
    ]
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        factors = llama3_factors(config.head_size, config.rotary_base, scaling)
        steps.append(("rope_freqs.weight", tuple(factors.shape), lambda: factors))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = gguf.GGUFWriter(unfinished, architecture)
    try:
        for key, value in metadata.items():
            _put(writer, key, value)
        kinds = {stored: _kind(gguf, dtype, shape) for stored, shape, _ in steps}
        for stored, shape, _ in steps:
            block, size = gguf.GGML_QUANT_SIZES[kinds[stored]]
            writer.add_tensor_info(stored, shape, np.float32, math.prod(shape) // block * size, kinds[stored])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored, _, make in steps:
            writer.write_tensor_data(_encode(gguf, stored, make(), kinds[stored]))
        for file in writer.fout:
            file.flush()
            os.fsync(file.fileno())
        writer.close()
        os.replace(unfinished, path)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def _architecture(config: ModelConfig) -> str:
    """The architecture that can express a configuration; llama.cpp knows no mixtures of them."""
    demands = FIXED | dict(
        embedding_scale=False, embedding_norm=False, num_segments=0, logits_scale=1.0, logits_bias="none",
        rotary_fraction=1.0, window_layers=None, scale=config.head_size**-0.5,
    )  # fmt: skip
    biases = (config.attention_bias, config.attention_output_bias, config.ffn_bias)
    architecture = "qwen3" if config.qk_norm else "qwen2" if biases == (True, False, False) else "llama"
    if architecture == "qwen3":
        demands |= dict(attention_bias=False, attention_output_bias=False, ffn_bias=False)
    for key, wanted in demands.items():
        if (value := getattr(config, key)) != wanted:
            raise ValueError(f"a GGUF file ({architecture}) cannot hold this model: {key} is {value!r}, not {wanted!r}")
    scaling = config.rotary_scaling
    if scaling is not None and (
        scaling.kind == "dynamic"
        or (scaling.kind == "llama3" and (scaling.low_freq_factor, scaling.high_freq_factor) != (1.0, 4.0))
        or (scaling.kind == "yarn" and not scaling.truncate)
    ):
        raise ValueError(f"a GGUF file ({architecture}) cannot hold this model's rotary scaling: {scaling}")
    return architecture


def _metadata(config: ModelConfig, architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.d_model,
        "block_count": config.num_decoder_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.sliding_window": config.window,
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.rotary_base),
    }
    scaling = config.rotary_scaling
    if scaling is not None:
        values["rope.scaling.original_context_length"] = scaling.original_max_positions
    if scaling is not None and scaling.kind != "llama3":
        values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling is not None and scaling.kind == "yarn":
        values["rope.scaling.yarn_beta_fast"] = float(scaling.beta_fast)
        values["rope.scaling.yarn_beta_slow"] = float(scaling.beta_slow)
        if scaling.attention_factor is not None:
            values["rope.scaling.attn_factor"] = scaling.attention_factor / yarn_magnitude(scaling.factor)
    ends = (config.eos_id,) if isinstance(config.eos_id, int) else config.eos_id or ()
    tokens = dict(zip(("eos", "eot", "eom"), ends, strict=False)) | {"bos": config.bos_id, "padding": config.pad_id}
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None} | {
        f"tokenizer.ggml.{which}_token_id": token for which, token in tokens.items() if token is not None
    }


def _put(writer: Any, key: str, value: Any) -> None:
    add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    getattr(writer, add[type(value)])(key, value)


def _kind(gguf: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Vectors are float32; a row that is not a whole number of quantised blocks is float16, as llama.cpp has it."""
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    return kinds[dtype] if shape[-1] % gguf.GGML_QUANT_SIZES[kinds[dtype]][0] == 0 else kinds.F16


def _encode(gguf: Any, name: str, weight: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    if kind.name not in PLAIN:
        return np.asarray(gguf.quants.quantize(weight.contiguous().numpy(), kind))
    plain = weight.to(PLAIN[kind.name]).contiguous()
    if kind.name == "F16" and not bool(plain.isfinite().all()):
        raise ValueError(f"{name!r} has values beyond the range of F16 (or not finite); write BF16 instead")
    return plain.view(torch.uint8).numpy()
