"""LLaMA-family models in GGUF files, llama.cpp's format: read a tensor at a time, and written.

The header is parsed here and not by the gguf library, whose reader loops for ever on some damaged files; the library
knows the quantised types.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig, RotaryScaling, unknown
from ..core.positions import rotary_rates
from ..models import Model, build
from .rules import Rule, expand, rename
from .tensors import CheckpointError, StoredTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
WRITTEN = ("F32", "F16", "BF16", "Q8_0")
NO_TOKEN = 2**32 - 1  # some writers' way of saying that there is no such token

# The types of values in the header: struct's letter for a number; strings and arrays are apart.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6

_ATTENTION, _FEED_FORWARD = "decoder.blocks.{i}.attention.", "decoder.blocks.{i}.feed_forward."
_RULES: list[Rule] = [
    *rename("token_embd", "decoder.embeddings.tokens", "weight"),
    *rename("blk.{i}.attn_norm", _ATTENTION + "norm", "weight"),
    *rename("blk.{i}.attn_q", _ATTENTION + "sublayer.query"),
    *rename("blk.{i}.attn_k", _ATTENTION + "sublayer.key"),
    *rename("blk.{i}.attn_v", _ATTENTION + "sublayer.value"),
    *rename("blk.{i}.attn_output", _ATTENTION + "sublayer.output"),
    *rename("blk.{i}.attn_q_norm", _ATTENTION + "sublayer.query_norm", "weight"),
    *rename("blk.{i}.attn_k_norm", _ATTENTION + "sublayer.key_norm", "weight"),
    *rename("blk.{i}.ffn_norm", _FEED_FORWARD + "norm", "weight"),
    *rename("blk.{i}.ffn_gate", _FEED_FORWARD + "sublayer.gate"),
    *rename("blk.{i}.ffn_up", _FEED_FORWARD + "sublayer.up"),
    *rename("blk.{i}.ffn_down", _FEED_FORWARD + "sublayer.down"),
    *rename("output_norm", "decoder.final_norm", "weight"),
    *rename("output", "head.logits", "weight"),
]
# What every model of these architectures is, whatever its file says.
_FIXED: dict[str, Any] = dict(
    shape="decoder", norm="rmsnorm", placement="pre", final_norm=True, positions="rotary", activation="silu",
    gated=True, head="lm",
)  # fmt: skip
# Keys whose other values change the mathematics, with the value that does not.
_NEUTRAL = {
    "expert_count": 0, "logit_scale": 1, "embedding_scale": 1, "residual_scale": 1, "attention.clamp_kqv": 0,
    "rope.scaling.yarn_ext_factor": 1, "rope.scaling.yarn_attn_factor": 1, "rope.scaling.yarn_log_multiplier": 0,
}  # fmt: skip


@dataclass(frozen=True)
class GGUFCheckpoint:
    config: ModelConfig
    tensors: dict[str, StoredTensor]  # by the name of our parameter; a tied one by the first of its names
    metadata: dict[str, Any]  # everything the header says, as plain Python values


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("reading GGUF needs the gguf package: pip install 'sublayer[gguf]'") from None
    return gguf


# Reading


def read_gguf(path: Path) -> GGUFCheckpoint:
    """The header of a file, checked; the tensors are read when they are asked for."""
    gguf = _library()
    try:
        with path.open("rb") as file:
            metadata, stored = _Header(path, file).read(gguf)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: " + unknown("architecture of a GGUF file", architecture, ARCHITECTURES))
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path} is one part of a split model; join the parts with llama-gguf-split --merge")
    config = _Keys(path, metadata, architecture).config(stored)
    try:
        shapes = {name: tuple(value.shape) for name, value in build(config, device="meta").named_parameters()}
    except RuntimeError as error:  # sizes that overflow
        raise CheckpointError(f"{path} describes no model that can be built: {str(error).splitlines()[0]}") from None
    tensors = {}
    for rule in _rules(config):
        ours = rule.ours[0] if rule.ours[0] in shapes else "head.logits.weight"
        if rule.stored not in stored:
            raise CheckpointError(f"{path} lacks the tensor {rule.stored!r}; the file is incomplete")
        entry = stored.pop(rule.stored)
        if entry.shape != shapes[ours]:
            raise CheckpointError(
                f"{path}: tensor {rule.stored!r} has shape {entry.shape}, but the metadata makes it {shapes[ours]}"
            )
        order = _interleaved(config, rule.stored) if architecture == "llama" else None
        tensors[ours] = entry.stored(path, gguf, None if order is None else torch.argsort(order))
    stored.pop("rope_freqs.weight", None)
    if stored:
        raise CheckpointError(f"{path} holds the tensor {next(iter(stored))!r}, which no {architecture!r} model has")
    return GGUFCheckpoint(config, tensors, metadata)


def _rules(config: ModelConfig) -> list[Rule]:
    """The tensors of a file with this model, in its order."""
    absent = {"head.logits.weight"} if config.tie_embeddings else set()
    parts = {
        "query_norm.weight": config.qk_norm, "key_norm.weight": config.qk_norm, "query.bias": config.attention_bias,
        "key.bias": config.attention_bias, "value.bias": config.attention_bias,
        "output.bias": config.attention_output_bias, "gate.bias": config.ffn_bias, "up.bias": config.ffn_bias,
        "down.bias": config.ffn_bias,
    }  # fmt: skip
    depth = {"decoder": config.num_decoder_layers}
    return expand(_RULES, depth, lambda name: name not in absent and parts.get(".".join(name.split(".")[-2:]), True))


def _interleaved(config: ModelConfig, stored: str) -> Tensor | None:
    """Which of our rows each row of a query or key is in a `llama` file, where rotary pairs are neighbours."""
    kind = stored.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return None
    heads = config.num_heads if kind == "attn_q" else config.kv_heads
    rows = torch.arange(heads * config.head_size, device="cpu")
    return rows.view(heads, 2, config.head_size // 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header describes it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    row_bytes: int

    def stored(self, path: Path, gguf: Any, order: Tensor | None) -> StoredTensor:
        """`order` says which row of the file each row of ours is."""
        width, kind, row_bytes = (self.shape[-1] if len(self.shape) > 1 else 1), self.kind, self.row_bytes
        dtype = PLAIN.get(kind, torch.float32)

        def decode(raw: np.ndarray[Any, Any]) -> Tensor:
            if kind in PLAIN:
                return torch.from_numpy(raw).view(dtype)
            with np.errstate(all="ignore"):  # what is not a number is found and named by the reader of the tensor
                return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))

        def read(start: int, stop: int, into: Tensor) -> None:
            first, last = start // width, -(-stop // width)
            rows = torch.arange(first, last, device="cpu") if order is None else order[first:last]
            low, high = int(rows.min()), int(rows.max()) + 1  # within the heads asked for
            raw = np.empty((high - low, row_bytes), dtype=np.uint8)
            _fill(path, self.offset + low * row_bytes, raw)
            values = decode(raw if order is None else raw[(rows - low).numpy()])
            into.copy_(values.reshape(-1)[start - first * width : stop - first * width])

        return StoredTensor(self.name, path, dtype, self.shape, read)


def _fill(path: Path, place: int, into: np.ndarray[Any, Any]) -> None:
    view = into.reshape(-1).data
    with path.open("rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], place)
            if not count:
                raise CheckpointError(f"{path} ended early: it changed while it was read")
            view, place = view[count:], place + count


class _Header:
    """Parses what may be damaged: nothing is reserved or repeated on the word of a number in the file alone."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, gguf: Any) -> tuple[dict[str, Any], dict[str, _Entry]]:
        if self.file.read(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        version = self.number("I")
        if version not in (2, 3):
            big = " (or is big-endian)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path} is GGUF version {version}{big}; supported are versions 2 and 3")
        tensors, keys = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.name()
            if key in metadata:
                raise CheckpointError(f"{self.path} has the key {key!r} twice")
            metadata[key] = self.value(key, self.number("I"))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.name()
            if name in infos:
                raise CheckpointError(f"{self.path} has the tensor {name!r} twice")
            dimensions = self.number("I")
            if not 1 <= dimensions <= 4:
                raise CheckpointError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; expected 1 to 4")
            shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            infos[name] = (shape, self.number("I"), self.number("Q"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; expected a power of two")
        start = -(-self.file.tell() // alignment) * alignment
        return metadata, {name: self.entry(gguf, name, start, *info) for name, info in infos.items()}

    def entry(self, gguf: Any, name: str, start: int, shape: tuple[int, ...], number: int, offset: int) -> _Entry:
        kinds = {kind.value: kind for kind in gguf.GGMLQuantizationType}
        kind = kinds[number].name if number in kinds else f"number {number}"
        if kind not in PLAIN and kind not in QUANTISED:
            known = ", ".join([*PLAIN, *QUANTISED])
            raise CheckpointError(f"{self.path}: tensor {name!r} is of type {kind}; supported are {known}")
        block, size = gguf.GGML_QUANT_SIZES[kinds[number]]
        width = shape[-1] if len(shape) > 1 else 1
        if width % block or 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {name!r} of type {kind} cannot have the shape {shape}")
        row_bytes = width // block * size
        if start + offset + math.prod(shape) // width * row_bytes > self.size:
            raise CheckpointError(f"{self.path} ends inside the tensor {name!r}; download it again")
        return _Entry(name, kind, shape, start + offset, row_bytes)

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise CheckpointError(f"{self.path} ends inside its header; download it again")
        return self.file.read(count)

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def name(self) -> str:
        name = self.text()
        if len(name) > 256:
            raise CheckpointError(f"{self.path} has a name of {len(name)} characters in its header; it is damaged")
        return name

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _FLOAT32:  # the shortest number that is this float32: 1e-05, and not 9.999999747378752e-06
            return float(str(np.float32(self.number("f"))))
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: the key {key!r} has a value of unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self.path}: the key {key!r} is an array of type {kind}, which is not supported")
        letter = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize("<" + letter))))


class _Keys:
    """The metadata of an architecture, to our configuration."""

    def __init__(self, path: Path, metadata: dict[str, Any], architecture: str) -> None:
        self.path, self.metadata, self.architecture = path, metadata, architecture

    def get(self, key: str, kind: type, default: Any = None, *, needed: bool = False) -> Any:
        key = key if key.startswith("tokenizer.") else f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if value is None and needed:
            raise CheckpointError(f"{self.path} lacks the key {key!r}")
        if value is not None and not (type(value) is kind or (kind is float and type(value) is int)):
            raise CheckpointError(f"{self.path}: the key {key!r} is {str(value)[:60]}; expected one {kind.__name__}")
        return value

    def config(self, stored: dict[str, _Entry]) -> ModelConfig:
        for key, neutral in _NEUTRAL.items():
            if (value := self.get(key, float, neutral)) != neutral:
                raise CheckpointError(f"{self.path}: {self.architecture}.{key} is {value}; only {neutral} is supported")
        if "token_embd.weight" not in stored:
            raise CheckpointError(f"{self.path} lacks the tensor 'token_embd.weight'; the file is incomplete")
        depth, width = self.get("block_count", int, needed=True), self.get("embedding_length", int, needed=True)
        heads = self.get("attention.head_count", int, needed=True)
        if depth * 9 > len(stored) or heads < 1:  # a layer has nine tensors at least
            raise CheckpointError(f"{self.path} has {depth} layers of {heads} heads in {len(stored)} tensors")
        head_dim = self.get("attention.key_length", int, width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self.get(key, int, head_dim)) != head_dim:
                raise CheckpointError(f"{self.path}: {key} is {value}, of {head_dim} in a head; both must be the same")
        query = stored.get("blk.0.attn_q.weight")
        if query is None or query.shape != (heads * head_dim, width):
            raise CheckpointError(
                f"{self.path}: 'blk.0.attn_q.weight' is absent or not of shape {(heads * head_dim, width)}, "
                "as the metadata makes it"
            )
        vocabulary = stored["token_embd.weight"].shape[0]
        base = float(self.get("rope.freq_base", float, 10_000.0))
        try:
            scaling = self.scaling(head_dim, base, stored.get("rope_freqs.weight"))
            if not bool(rotary_rates(head_dim, base, scaling).isfinite().all()):
                raise CheckpointError(f"{self.path}: the rope keys in the metadata give angles that are no numbers")
            return ModelConfig(
                **_FIXED,
                vocab_size=vocabulary,
                d_model=width,
                d_ff=self.get("feed_forward_length", int, needed=True),
                num_heads=heads,
                num_kv_heads=self.get("attention.head_count_kv", int, heads),
                num_decoder_layers=depth,
                head_dim=head_dim,
                attention_scale=self.get("attention.scale", float) or None,
                attention_bias="blk.0.attn_q.bias" in stored,
                attention_output_bias="blk.0.attn_output.bias" in stored,
                ffn_bias="blk.0.ffn_up.bias" in stored,
                qk_norm=self.architecture == "qwen3",
                window=self.get("attention.sliding_window", int) or None,
                norm_eps=self.get("attention.layer_norm_rms_epsilon", float, needed=True),
                max_positions=self.get("context_length", int, 2048),
                rotary_base=base,
                rotary_scaling=scaling,
                tie_embeddings="output.weight" not in stored,
                init="normal",
                bos_id=self.token("bos", vocabulary),
                eos_id=self.ends(vocabulary),
                pad_id=self.token("padding", vocabulary),
            )
        except CheckpointError:
            raise
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise CheckpointError(f"{self.path} describes no model that can be built: {error}") from None

    def token(self, which: str, vocabulary: int) -> int | None:
        value: int | None = self.get(f"tokenizer.ggml.{which}_token_id", int)
        if value is None or value in (-1, NO_TOKEN):
            return None
        if not 0 <= value < vocabulary:
            raise CheckpointError(f"{self.path}: {which}_token_id is {value}, outside the vocabulary of {vocabulary}")
        return value

    def ends(self, vocabulary: int) -> int | tuple[int, ...] | None:
        """The end of a text, of a turn and of a message, where they differ."""
        found = [self.token(which, vocabulary) for which in ("eos", "eot", "eom")]
        ends = tuple(dict.fromkeys(token for token in found if token is not None))
        return (ends[0] if len(ends) == 1 else ends) if ends else None

    def scaling(self, dim: int, base: float, factors: _Entry | None) -> RotaryScaling | None:
        kind = self.get("rope.scaling.type", str, "linear" if self.get("rope.scale_linear", float) else "none")
        trained = self.get("rope.scaling.original_context_length", int)
        if factors is not None:
            return self.llama3(kind, dim, base, trained or 8192, factors)
        factor = float(self.get("rope.scaling.factor", float, self.get("rope.scale_linear", float, 1.0)))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        if kind == "linear":
            return RotaryScaling(kind=kind, factor=factor)
        if kind != "yarn":
            raise CheckpointError(f"{self.path}: " + unknown("rope.scaling.type", kind, ("none", "linear", "yarn")))
        magnitude = float(self.get("rope.scaling.attn_factor", float, 1.0))
        return RotaryScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=trained or self.get("context_length", int),
            beta_fast=self.get("rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=self.get("rope.scaling.yarn_beta_slow", float, 1.0),
            attention_factor=None if magnitude == 1.0 else magnitude * _yarn_magnitude(factor),
        )

    def llama3(self, kind: str, dim: int, base: float, trained: int, entry: _Entry) -> RotaryScaling | None:
        """LLaMA 3's scaling is stored as its result, a divisor for each rate: find the scaling that gives it."""
        refusal = f"{self.path}: 'rope_freqs.weight' holds factors that are not LLaMA 3's scaling; not supported"
        if entry.shape != (dim // 2,) or kind != "none" or base <= 0:
            raise CheckpointError(refusal)
        factors = entry.stored(self.path, _library(), None).load().float()
        factor = round(float(factors.max()), 3)
        if not math.isfinite(factor) or factor < 1:
            raise CheckpointError(refusal)
        scaling = RotaryScaling(kind="llama3", factor=factor, original_max_positions=trained)
        if not torch.allclose(llama3_factors(dim, base, scaling), factors, rtol=1e-3, atol=0):
            raise CheckpointError(refusal)
        return None if factor == 1 else scaling


def llama3_factors(dim: int, base: float, scaling: RotaryScaling) -> Tensor:
    return rotary_rates(dim, base, None) / rotary_rates(dim, base, scaling)


def _yarn_magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0


# Writing


def write_gguf(
    model: Model, path: Path, *, dtype: str = "F16", tokenizer_json: Path | None = None, name: str = ""
) -> None:
    """A LLaMA-like decoder as a GGUF file, whole or not at all, holding about one tensor at a time.

    Vectors stay float32. So that llama.cpp can take text, give the tokenizer.json that belongs to the model.
    """
    gguf = _library()
    if dtype not in WRITTEN:
        raise ValueError(unknown("GGUF type", dtype, WRITTEN))
    config = model.config
    architecture = _architecture(config)
    weights = dict(model.named_parameters(remove_duplicate=False))
    rules = _rules(config)
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
        order = _interleaved(config, rule.stored) if architecture == "llama" else None
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
    demands = _FIXED | dict(
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
            values["rope.scaling.attn_factor"] = scaling.attention_factor / _yarn_magnitude(scaling.factor)
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
