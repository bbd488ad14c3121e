"""GPT-2 (and DialoGPT, which is GPT-2)."""

from __future__ import annotations

from ...config import ModelConfig
from ..family import Family, Values
from ..rules import FUSED, FUSED_TRANSPOSE, TRANSPOSE, Rule, rename


def _read(theirs: Values) -> Values:
    inner, width = theirs.get("n_inner"), theirs.get("n_embd")
    values: Values = dict(tie_embeddings=theirs.get("tie_word_embeddings", True))
    values["d_ff"] = 4 * width if inner is None and isinstance(width, int) else inner
    values["attention_scale"] = None if theirs.get("scale_attn_weights", True) else 1.0
    return values


def _write(config: ModelConfig) -> Values:
    return dict(
        n_inner=None if config.d_ff == 4 * config.d_model else config.d_ff, embd_pdrop=config.dropout,
        tie_word_embeddings=config.tie_embeddings, scale_attn_weights=config.attention_scale != 1.0,
        n_ctx=config.max_positions,
    )  # fmt: skip


def _rules(config: ModelConfig) -> list[Rule]:
    attention, feed_forward = "decoder.blocks.{i}.attention.", "decoder.blocks.{i}.feed_forward."

    def fused(part: str) -> tuple[str, ...]:
        return tuple(f"{attention}sublayer.{name}.{part}" for name in ("query", "key", "value"))

    return [
        *rename("wte", "decoder.embeddings.tokens", "weight"),
        *rename("wpe", "decoder.embeddings.positions", "weight"),
        *rename("h.{i}.ln_1", attention + "norm"),
        Rule("h.{i}.attn.c_attn.weight", fused("weight"), FUSED_TRANSPOSE),
        Rule("h.{i}.attn.c_attn.bias", fused("bias"), FUSED),
        *rename("h.{i}.attn.c_proj", attention + "sublayer.output", "weight", op=TRANSPOSE),
        *rename("h.{i}.attn.c_proj", attention + "sublayer.output", "bias"),
        *rename("h.{i}.ln_2", feed_forward + "norm"),
        *rename("h.{i}.mlp.c_fc", feed_forward + "sublayer.up", "weight", op=TRANSPOSE),
        *rename("h.{i}.mlp.c_fc", feed_forward + "sublayer.up", "bias"),
        *rename("h.{i}.mlp.c_proj", feed_forward + "sublayer.down", "weight", op=TRANSPOSE),
        *rename("h.{i}.mlp.c_proj", feed_forward + "sublayer.down", "bias"),
        *rename("ln_f", "decoder.final_norm"),
        Rule("^lm_head.weight", ("head.logits.weight",)),
    ]


GPT2 = Family(
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": dict(head="lm"), "GPT2Model": dict(head="none")},
    fixed=dict(
        shape="decoder", placement="pre", final_norm=True, positions="learned", init="normal", init_depth_scaled=True
    ),
    fields=dict(
        vocab_size="vocab_size", d_model="n_embd", num_heads="n_head", num_decoder_layers="n_layer",
        max_positions="n_positions", activation="activation_function", norm_eps="layer_norm_epsilon",
        dropout="resid_pdrop", attention_dropout="attn_pdrop", init_std="initializer_range", pad_id="pad_token_id",
        bos_id="bos_token_id", eos_id="eos_token_id",
    ),
    defaults=dict(
        n_positions=1024, activation_function="gelu_new", layer_norm_epsilon=1e-5, resid_pdrop=0.1, attn_pdrop=0.1,
        initializer_range=0.02, pad_token_id=None, bos_token_id=50_256, eos_token_id=50_256,
    ),
    demands=dict(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    read=_read,
    write=_write,
    rules=_rules,
    prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # buffers of the causal mask
)  # fmt: skip
