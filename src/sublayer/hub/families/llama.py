"""LLaMA 1, 2 and 3, and what is built like it: Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig, RotaryScaling, unknown
from ..family import Family, Values
from ..rules import Rule, rename
from ..tensors import CheckpointError

_FIXED: Values = dict(
    shape="decoder", norm="rmsnorm", placement="pre", final_norm=True, positions="rotary", gated=True, init="normal"
)
_FIELDS = dict(
    vocab_size="vocab_size", d_model="hidden_size", d_ff="intermediate_size", num_decoder_layers="num_hidden_layers",
    num_heads="num_attention_heads", num_kv_heads="num_key_value_heads", activation="hidden_act",
    max_positions="max_position_embeddings", norm_eps="rms_norm_eps", attention_dropout="attention_dropout",
    init_std="initializer_range", pad_id="pad_token_id", bos_id="bos_token_id", eos_id="eos_token_id",
    tie_embeddings="tie_word_embeddings",
)  # fmt: skip
_DEFAULTS: Values = dict(
    num_key_value_heads=None, head_dim=None, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6,
    attention_dropout=0.0, initializer_range=0.02, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
)  # fmt: skip
# What `rope_type` is called there and here, with the numbers each needs.
_SCALINGS = {"linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
_NUMBERS = dict(
    factor="factor", original_max_positions="original_max_position_embeddings", low_freq_factor="low_freq_factor",
    high_freq_factor="high_freq_factor", beta_fast="beta_fast", beta_slow="beta_slow",
    attention_factor="attention_factor", truncate="truncate",
)  # fmt: skip


def read_rotary(theirs: Values) -> Values:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`."""
    rope: Any = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: rope_scaling is {rope!r}; expected an object")
    base = rope.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    fraction = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
    values: Values = dict(rotary_base=float(base) if isinstance(base, int) else base, rotary_fraction=fraction)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return values
    if kind not in _SCALINGS:
        raise CheckpointError(unknown("rope_type in config.json", kind, [*_SCALINGS, "default"]))
    numbers = {ours: rope[key] for ours, key in _NUMBERS.items() if rope.get(key) is not None}
    if kind in ("yarn", "llama3"):
        numbers.setdefault("original_max_positions", theirs.get("max_position_embeddings"))
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        raise CheckpointError("config.json: yarn with mscale and mscale_all_dim is not supported")
    try:
        values["rotary_scaling"] = RotaryScaling(kind=_SCALINGS[kind], **numbers)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"config.json: rope_scaling: {error}") from None
    return values


def write_rotary(config: ModelConfig) -> Values:
    """Both spellings, so that readers of either generation understand."""
    base: Values = {"rope_theta": config.rotary_base}
    if config.rotary_fraction != 1.0:
        base["partial_rotary_factor"] = config.rotary_fraction
    scaling = config.rotary_scaling
    if scaling is None:
        return base | {"rope_scaling": None, "rope_parameters": base | {"rope_type": "default"}}
    wanted = {"linear": ["factor"], "dynamic": ["factor"]}.get(scaling.kind) or {
        "llama3": ["factor", "original_max_positions", "low_freq_factor", "high_freq_factor"],
        "yarn": ["factor", "original_max_positions", "beta_fast", "beta_slow", "attention_factor", "truncate"],
    }[scaling.kind]
    numbers = {_NUMBERS[name]: getattr(scaling, name) for name in wanted if getattr(scaling, name) is not None}
    rope = {"rope_type": scaling.kind, **numbers}
    return base | {"rope_scaling": rope, "rope_parameters": base | rope}


def _read_head_dim(theirs: Values) -> Values:
    return {"head_dim": theirs.get("head_dim")}


def _write_head_dim(config: ModelConfig) -> Values:
    return {"head_dim": config.head_size}


def _read_llama(theirs: Values) -> Values:
    bias = theirs["attention_bias"]
    biases = dict(attention_bias=bias, attention_output_bias=bias, ffn_bias=theirs["mlp_bias"])
    return read_rotary(theirs) | _read_head_dim(theirs) | biases


def _write_llama(config: ModelConfig) -> Values:
    biases = dict(attention_bias=config.attention_bias, mlp_bias=config.ffn_bias)
    return write_rotary(config) | _write_head_dim(config) | biases


def _rules(config: ModelConfig) -> list[Rule]:
    attention, feed_forward = "decoder.blocks.{i}.attention.", "decoder.blocks.{i}.feed_forward."
    return [
        *rename("embed_tokens", "decoder.embeddings.tokens", "weight"),
        *rename("layers.{i}.input_layernorm", attention + "norm", "weight"),
        *rename("layers.{i}.self_attn.q_proj", attention + "sublayer.query"),
        *rename("layers.{i}.self_attn.k_proj", attention + "sublayer.key"),
        *rename("layers.{i}.self_attn.v_proj", attention + "sublayer.value"),
        *rename("layers.{i}.self_attn.o_proj", attention + "sublayer.output"),
        *rename("layers.{i}.self_attn.q_norm", attention + "sublayer.query_norm", "weight"),
        *rename("layers.{i}.self_attn.k_norm", attention + "sublayer.key_norm", "weight"),
        *rename("layers.{i}.post_attention_layernorm", feed_forward + "norm", "weight"),
        *rename("layers.{i}.mlp.gate_proj", feed_forward + "sublayer.gate"),
        *rename("layers.{i}.mlp.up_proj", feed_forward + "sublayer.up"),
        *rename("layers.{i}.mlp.down_proj", feed_forward + "sublayer.down"),
        *rename("norm", "decoder.final_norm", "weight"),
        Rule("^lm_head.weight", ("head.logits.weight",)),
    ]


def _family(model_type: str, name: str, **more: Any) -> Family:
    settings: dict[str, Any] = dict(
        model_type=model_type,
        architectures={f"{name}ForCausalLM": dict(head="lm"), f"{name}Model": dict(head="none")},
        fixed=_FIXED, fields=_FIELDS, defaults=_DEFAULTS, rules=_rules, prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq",),
    )  # fmt: skip
    return Family(**(settings | more))


LLAMA = _family("llama", "Llama", read=_read_llama, write=_write_llama)

_NO_BIAS: Values = dict(attention_bias=False, attention_output_bias=False, ffn_bias=False)


def _read_mistral(theirs: Values) -> Values:
    return read_rotary(theirs) | _read_head_dim(theirs) | dict(window=theirs["sliding_window"])


def _write_mistral(config: ModelConfig) -> Values:
    return write_rotary(config) | _write_head_dim(config) | dict(sliding_window=config.window)


MISTRAL = _family(
    "mistral",
    "Mistral",
    fixed=_FIXED | _NO_BIAS,
    defaults=_DEFAULTS | dict(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131_072),
    read=_read_mistral,
    write=_write_mistral,
)


def _read_window(theirs: Values) -> Values:
    """Qwen uses the window in the layers from max_window_layers on, or in those that layer_types names."""
    if not theirs.get("use_sliding_window", False) or theirs.get("sliding_window") is None:
        return {}
    depth = theirs.get("num_hidden_layers")
    if not isinstance(depth, int) or depth > 10_000:
        raise CheckpointError(f"config.json: num_hidden_layers is {depth!r}; expected a whole number")
    kinds = theirs.get("layer_types")
    if isinstance(kinds, list):
        layers = tuple(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        first = theirs.get("max_window_layers", 28)
        layers = tuple(range(first, depth)) if isinstance(first, int) else ()
    if not layers:
        return {}
    return dict(window=theirs["sliding_window"], window_layers=None if len(layers) == depth else layers)


def _write_window(config: ModelConfig) -> Values:
    depth = config.num_decoder_layers
    windowed = range(depth) if config.window_layers is None else config.window_layers
    used = config.window is not None
    kinds = ["sliding_attention" if used and n in windowed else "full_attention" for n in range(depth)]
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else depth
    return dict(use_sliding_window=used, sliding_window=config.window, layer_types=kinds, max_window_layers=first)


def _read_qwen2(theirs: Values) -> Values:
    return read_rotary(theirs) | _read_head_dim(theirs) | _read_window(theirs)


def _write_qwen2(config: ModelConfig) -> Values:
    return write_rotary(config) | _write_head_dim(config) | _write_window(config)


_QWEN_DEFAULTS = _DEFAULTS | dict(bos_token_id=None, eos_token_id=None, max_position_embeddings=32_768)

QWEN2 = _family(
    "qwen2",
    "Qwen2",
    fixed=_FIXED | _NO_BIAS | dict(attention_bias=True),
    defaults=_QWEN_DEFAULTS,
    read=_read_qwen2,
    write=_write_qwen2,
)


def _read_qwen3(theirs: Values) -> Values:
    bias = theirs["attention_bias"]
    return _read_qwen2(theirs) | dict(attention_bias=bias, attention_output_bias=bias)


def _write_qwen3(config: ModelConfig) -> Values:
    return _write_qwen2(config) | dict(attention_bias=config.attention_bias)


QWEN3 = _family(
    "qwen3",
    "Qwen3",
    fixed=_FIXED | _NO_BIAS | dict(qk_norm=True),
    defaults=_QWEN_DEFAULTS | dict(head_dim=128),
    read=_read_qwen3,
    write=_write_qwen3,
)
