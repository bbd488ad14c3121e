"""BART and Marian: post-norm encoder-decoders whose logits carry a fixed bias."""

from __future__ import annotations

from ...config import ModelConfig
from ..family import Family, Values
from ..rules import Rule, leading_ones, rename
from ..tensors import CheckpointError

_FIXED: Values = dict(shape="encoder-decoder", placement="post", init="normal")
_FIELDS = dict(
    vocab_size="vocab_size", d_model="d_model", d_ff="encoder_ffn_dim", num_heads="encoder_attention_heads",
    num_encoder_layers="encoder_layers", num_decoder_layers="decoder_layers", activation="activation_function",
    dropout="dropout", attention_dropout="attention_dropout", ffn_dropout="activation_dropout", init_std="init_std",
    embedding_scale="scale_embedding", max_positions="max_position_embeddings", pad_id="pad_token_id",
    bos_id="bos_token_id", eos_id="eos_token_id", start_id="decoder_start_token_id",
    tie_embeddings="tie_word_embeddings",
)  # fmt: skip
_DEFAULTS: Values = dict(
    activation_function="gelu", dropout=0.1, attention_dropout=0.0, activation_dropout=0.0, init_std=0.02,
    scale_embedding=False, max_position_embeddings=1024, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    decoder_start_token_id=2, tie_word_embeddings=True,
)  # fmt: skip
_DEMANDS: Values = dict(normalize_before=False, add_final_layer_norm=False)
_BIAS = Rule("^final_logits_bias", ("head.logits.bias",), leading_ones(1))


def _check_sides(theirs: Values) -> None:
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = theirs.get(f"encoder_{name}"), theirs.get(f"decoder_{name}")
        if decoder is not None and encoder != decoder:
            raise CheckpointError(
                f"config.json has encoder_{name} {encoder} and decoder_{name} {decoder}; they must be equal"
            )


def _write_sides(config: ModelConfig) -> Values:
    return dict(
        decoder_ffn_dim=config.d_ff, decoder_attention_heads=config.num_heads, is_encoder_decoder=True,
        num_hidden_layers=config.num_encoder_layers, forced_eos_token_id=config.eos_id,
    )  # fmt: skip


def _side(side: str) -> list[Rule]:
    stored, ours = f"{side}.layers.{{i}}.", f"{side}.blocks.{{i}}."
    rules = rename(f"{side}.layernorm_embedding", f"{side}.embeddings.norm")
    attentions = [("self_attn", "attention")] + ([("encoder_attn", "cross")] if side == "decoder" else [])
    for name, part in attentions:
        rules += rename(f"{stored}{name}_layer_norm", f"{ours}{part}.norm")
        for there, here in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "output")):
            rules += rename(f"{stored}{name}.{there}", f"{ours}{part}.sublayer.{here}")
    return [
        *rules,
        *rename(f"{stored}fc1", f"{ours}feed_forward.sublayer.up"),
        *rename(f"{stored}fc2", f"{ours}feed_forward.sublayer.down"),
        *rename(f"{stored}final_layer_norm", f"{ours}feed_forward.norm"),
    ]


def _read_bart(theirs: Values) -> Values:
    _check_sides(theirs)
    return {}


def _bart_rules(config: ModelConfig) -> list[Rule]:
    return [
        Rule("shared.weight", ("encoder.embeddings.tokens.weight",)),
        *rename("encoder.embed_positions", "encoder.embeddings.positions", "weight"),
        *rename("decoder.embed_positions", "decoder.embeddings.positions", "weight"),
        *_side("encoder"),
        *_side("decoder"),
        Rule("^lm_head.weight", ("head.logits.weight",)),
        _BIAS,
    ]


BART = Family(
    model_type="bart",
    architectures={
        "BartForConditionalGeneration": dict(head="lm", logits_bias="fixed"),
        "BartModel": dict(head="none"),
    },
    fixed=_FIXED | dict(positions="learned", position_offset=2, embedding_norm=True, share_embeddings=True),
    fields=_FIELDS,
    defaults=_DEFAULTS,
    demands=_DEMANDS,
    read=_read_bart,
    write=_write_sides,
    rules=_bart_rules,
    prefix="model.",
    copies=(
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("model.decoder.embed_tokens.weight", "model.shared.weight"),
    ),
    ignored=(r"(model\.)?(encoder|decoder)\.version",),
)


def _read_marian(theirs: Values) -> Values:
    _check_sides(theirs)
    shared = theirs.get("share_encoder_decoder_embeddings", True)
    target = theirs.get("decoder_vocab_size")
    return dict(
        share_embeddings=shared,
        target_vocab_size=None if target in (None, theirs.get("vocab_size")) else target,
    )


def _write_marian(config: ModelConfig) -> Values:
    return _write_sides(config) | dict(
        share_encoder_decoder_embeddings=config.share_embeddings, decoder_vocab_size=config.output_vocab_size,
        static_position_embeddings=True, normalize_embedding=False, add_bias_logits=False,
    )  # fmt: skip


def _marian_rules(config: ModelConfig) -> list[Rule]:
    if config.share_embeddings:
        tokens = [Rule("shared.weight", ("encoder.embeddings.tokens.weight",))]
    else:
        tokens = [
            Rule("encoder.embed_tokens.weight", ("encoder.embeddings.tokens.weight",)),
            Rule("decoder.embed_tokens.weight", ("decoder.embeddings.tokens.weight",)),
        ]
    return [
        *tokens,
        *_side("encoder"),
        *_side("decoder"),
        Rule("^lm_head.weight", ("head.logits.weight",)),
        _BIAS,
    ]


MARIAN = Family(
    model_type="marian",
    architectures={
        "MarianMTModel": dict(head="lm", logits_bias="fixed"),
        "MarianModel": dict(head="none"),
    },
    fixed=_FIXED | dict(positions="sinusoidal-block"),
    fields=_FIELDS,
    defaults=_DEFAULTS
    | dict(
        pad_token_id=58_100, decoder_start_token_id=58_100, eos_token_id=0, bos_token_id=None, normalize_embedding=False
    ),
    demands=_DEMANDS | dict(normalize_embedding=False, static_position_embeddings=True),
    read=_read_marian,
    write=_write_marian,
    rules=_marian_rules,
    prefix="model.",
    copies=(
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("model.decoder.embed_tokens.weight", "model.shared.weight"),
    ),
    # The sinusoids, stored by old writers.
    ignored=(r"(model\.)?(encoder|decoder)\.embed_positions\.weight",),
)
