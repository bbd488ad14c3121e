"""LLaMA-family models in GGUF files, llama.cpp's format: what the header says, and the tensors by our names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, RotaryScaling, unknown
from ..core.positions import rotary_rates
from ..models import build
from .gguf_file import Entry, Header, library
from .rules import Rule, expand, rename
from .tensors import CheckpointError, StoredTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NO_TOKEN = 2**32 - 1  # some writers' way of saying that there is no such token


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
FIXED: dict[str, Any] = dict(
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


def read_gguf(path: Path) -> GGUFCheckpoint:
    """The header of a file, checked; the tensors are read when they are asked for."""
    gguf = library()
    try:
        with path.open("rb") as file:
            metadata, stored = Header(path, file).read(gguf)
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
    for rule in rules_of(config):
        ours = rule.ours[0] if rule.ours[0] in shapes else "head.logits.weight"
        if rule.stored not in stored:
            raise CheckpointError(f"{path} lacks the tensor {rule.stored!r}; the file is incomplete")
        entry = stored.pop(rule.stored)
        if entry.shape != shapes[ours]:
            raise CheckpointError(
                f"{path}: tensor {rule.stored!r} has shape {entry.shape}, but the metadata makes it {shapes[ours]}"
            )
        order = interleaved(config, rule.stored) if architecture == "llama" else None
        tensors[ours] = entry.stored(path, gguf, None if order is None else torch.argsort(order))
    stored.pop("rope_freqs.weight", None)
    if stored:
        raise CheckpointError(f"{path} holds the tensor {next(iter(stored))!r}, which no {architecture!r} model has")
    return GGUFCheckpoint(config, tensors, metadata)


def rules_of(config: ModelConfig) -> list[Rule]:
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


def interleaved(config: ModelConfig, stored: str) -> Tensor | None:
    """Which of our rows each row of a query or key is in a `llama` file, where rotary pairs are neighbours."""
    kind = stored.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return None
    heads = config.num_heads if kind == "attn_q" else config.kv_heads
    rows = torch.arange(heads * config.head_size, device="cpu")
    return rows.view(heads, 2, config.head_size // 2).transpose(1, 2).reshape(-1)


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

    def config(self, stored: dict[str, Entry]) -> ModelConfig:
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
                **FIXED,
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

    def scaling(self, dim: int, base: float, factors: Entry | None) -> RotaryScaling | None:
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
            attention_factor=None if magnitude == 1.0 else magnitude * yarn_magnitude(factor),
        )

    def llama3(self, kind: str, dim: int, base: float, trained: int, entry: Entry) -> RotaryScaling | None:
        """LLaMA 3's scaling is stored as its result, a divisor for each rate: find the scaling that gives it."""
        refusal = f"{self.path}: 'rope_freqs.weight' holds factors that are not LLaMA 3's scaling; not supported"
        if entry.shape != (dim // 2,) or kind != "none" or base <= 0:
            raise CheckpointError(refusal)
        factors = entry.stored(self.path, library(), None).load().float()
        factor = round(float(factors.max()), 3)
        if not math.isfinite(factor) or factor < 1:
            raise CheckpointError(refusal)
        scaling = RotaryScaling(kind="llama3", factor=factor, original_max_positions=trained)
        if not torch.allclose(llama3_factors(dim, base, scaling), factors, rtol=1e-3, atol=0):
            raise CheckpointError(refusal)
        return None if factor == 1 else scaling


def llama3_factors(dim: int, base: float, scaling: RotaryScaling) -> Tensor:
    return rotary_rates(dim, base, None) / rotary_rates(dim, base, scaling)


def yarn_magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0
