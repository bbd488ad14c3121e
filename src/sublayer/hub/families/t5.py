"""T5 1.0, 1.1 (Flan) and mT5."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..family import Family, Values, read_activation, write_activation
from ..rules import Rule, rename
from ..tensors import CheckpointError

_FIXED: Values = dict(
    norm="rmsnorm", placement="pre", final_norm=True, positions="relative", attention_scale=1.0, attention_bias=False,
    attention_output_bias=False, ffn_bias=False, init="fan-in",
)  # fmt: skip
_FIELDS = dict(
    vocab_size="vocab_size", d_model="d_model", d_ff="d_ff", num_heads="num_heads", head_dim="d_kv",
    num_encoder_layers="num_layers", norm_eps="layer_norm_epsilon", dropout="dropout_rate",
    relative_buckets="relative_attention_num_buckets", relative_max_distance="relative_attention_max_distance",
    pad_id="pad_token_id", eos_id="eos_token_id",
)  # fmt: skip
_DEFAULTS: Values = dict(
    layer_norm_epsilon=1e-6, dropout_rate=0.1, relative_attention_num_buckets=32, relative_attention_max_distance=128,
    pad_token_id=0, eos_token_id=1, num_decoder_layers=None, feed_forward_proj="relu",
)  # fmt: skip


def _read(theirs: Values) -> Values:
    rate = theirs["dropout_rate"]
    values: Values = dict(attention_dropout=rate, ffn_dropout=rate)
    gate, _, name = str(theirs["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated"):
        raise CheckpointError(
            f"config.json: feed_forward_proj is {theirs['feed_forward_proj']!r}; expected e.g. 'relu'"
        )
    # "gated-gelu" has always meant the tanh form.
    values |= dict(gated=gate == "gated", activation="gelu-tanh" if (gate, name) == ("gated", "gelu") else "")
    values["activation"] = values["activation"] or read_activation(name)
    return values


def _read_pair(theirs: Values) -> Values:
    """Version 1.0 shrinks the logits; 1.1 says so by calling its matrices untied, or in so many words."""
    tied = theirs.get("tie_word_embeddings", True) is not False
    scaled = theirs.get("scale_decoder_outputs", tied) is not False
    width, layers = theirs.get("d_model"), theirs["num_decoder_layers"]
    values = _read(theirs) | dict(
        num_decoder_layers=theirs.get("num_layers") if layers is None else layers,
        start_id=theirs.get("decoder_start_token_id", 0), tie_embeddings=tied,
    )  # fmt: skip
    if scaled and isinstance(width, int) and width > 0:
        values["logits_scale"] = width**-0.5
    return values


def _read_mt5(theirs: Values) -> Values:
    return _read_pair(theirs) | dict(logits_scale=1.0)


def _write(config: ModelConfig) -> Values:
    name = "gelu" if config.gated and config.activation == "gelu-tanh" else write_activation(config.activation)
    pair = config.shape == "encoder-decoder"
    return dict(
        feed_forward_proj=f"gated-{name}" if config.gated else name, is_encoder_decoder=pair,
        num_decoder_layers=config.num_decoder_layers if pair else config.num_encoder_layers,
        decoder_start_token_id=config.start_id if pair else config.pad_id,
        tie_word_embeddings=config.tie_embeddings, scale_decoder_outputs=config.logits_scale != 1.0,
    )  # fmt: skip


def _side(side: str, config: ModelConfig) -> list[Rule]:
    stored, ours = f"{side}.block.{{i}}.layer.", f"{side}.blocks.{{i}}."
    last = 2 if side == "decoder" else 1
    rules = [
        Rule(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (f"{side}.bias.weight",)),
        *rename(f"{side}.final_layer_norm", f"{side}.final_norm", "weight"),
    ]
    sublayers = [("0.SelfAttention", "attention")] + ([("1.EncDecAttention", "cross")] if side == "decoder" else [])
    for name, part in sublayers:
        rules += rename(f"{stored}{name[0]}.layer_norm", f"{ours}{part}.norm", "weight")
        for letter, projection in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            rules += rename(f"{stored}{name}.{letter}", f"{ours}{part}.sublayer.{projection}", "weight")
    dense, feed_forward = f"{stored}{last}.DenseReluDense.", ours + "feed_forward."
    rules += rename(f"{stored}{last}.layer_norm", feed_forward + "norm", "weight")
    if config.gated:
        rules += rename(dense + "wi_0", feed_forward + "sublayer.gate", "weight")
        rules += rename(dense + "wi_1", feed_forward + "sublayer.up", "weight")
    else:
        rules += rename(dense + "wi", feed_forward + "sublayer.up", "weight")
    return [*rules, *rename(dense + "wo", feed_forward + "sublayer.down", "weight")]


def _rules(config: ModelConfig) -> list[Rule]:
    return [
        Rule("shared.weight", ("encoder.embeddings.tokens.weight",)),
        *_side("encoder", config),
        *_side("decoder", config),
        Rule("lm_head.weight", ("head.logits.weight",)),
    ]


def _family(model_type: str, name: str, read: Any, **more: Any) -> Family:
    pair = dict(shape="encoder-decoder", share_embeddings=True)
    encoder = dict(
        shape="encoder", head="none", num_decoder_layers=0, tie_embeddings=False, logits_scale=1.0, start_id=None
    )
    settings: dict[str, Any] = dict(
        architectures={
            f"{name}ForConditionalGeneration": pair | dict(head="lm"),
            f"{name}WithLMHeadModel": pair | dict(head="lm"),  # its name in old files
            f"{name}Model": pair | dict(head="none"),
            f"{name}EncoderModel": encoder,
        },
        fixed=_FIXED, fields=_FIELDS, defaults=_DEFAULTS, read=read, write=_write, rules=_rules,  always_ties=True,
        copies=(
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
        ),
        # A table that old files carry for the cross-attention, which never used one.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )  # fmt: skip
    return Family(model_type=model_type, **(settings | more))


T5 = _family("t5", "T5", _read_pair)
MT5 = _family("mt5", "MT5", _read_mt5, defaults=_DEFAULTS | dict(feed_forward_proj="gated-gelu"))
