"""ViT, with a classifier or plain."""

from __future__ import annotations

from ...config import ModelConfig
from ..family import Family, Values, labels, write_labels
from ..rules import Rule, leading_ones, rename


def _read(theirs: Values) -> Values:
    return dict(num_labels=labels(theirs), attention_bias=theirs.get("qkv_bias", True))


def _write(config: ModelConfig) -> Values:
    return write_labels(config) | dict(qkv_bias=config.attention_bias)


def _rules(config: ModelConfig) -> list[Rule]:
    stored, ours = "encoder.layer.{i}.", "encoder.blocks.{i}."
    attention, feed_forward = ours + "attention.", ours + "feed_forward."
    return [
        Rule("embeddings.cls_token", ("encoder.embeddings.class_token",), leading_ones(2)),
        Rule("embeddings.position_embeddings", ("encoder.embeddings.positions.weight",), leading_ones(1)),
        *rename("embeddings.patch_embeddings.projection", "encoder.embeddings.patches"),
        *rename(f"{stored}layernorm_before", attention + "norm"),
        *rename(f"{stored}attention.attention.query", attention + "sublayer.query"),
        *rename(f"{stored}attention.attention.key", attention + "sublayer.key"),
        *rename(f"{stored}attention.attention.value", attention + "sublayer.value"),
        *rename(f"{stored}attention.output.dense", attention + "sublayer.output"),
        *rename(f"{stored}layernorm_after", feed_forward + "norm"),
        *rename(f"{stored}intermediate.dense", feed_forward + "sublayer.up"),
        *rename(f"{stored}output.dense", feed_forward + "sublayer.down"),
        *rename("layernorm", "encoder.final_norm"),
        *rename("pooler.dense", "head.pooler.dense"),
        *rename("^classifier", "head.classifier"),
    ]


VIT = Family(
    model_type="vit",
    architectures={
        "ViTForImageClassification": dict(head="classifier", pooler="none"),
        "ViTModel": dict(head="none"),
    },
    fixed=dict(shape="encoder", placement="pre", final_norm=True, positions="learned", init="truncated", pooler="tanh"),
    fields=dict(
        d_model="hidden_size", d_ff="intermediate_size", num_heads="num_attention_heads",
        num_encoder_layers="num_hidden_layers", activation="hidden_act", norm_eps="layer_norm_eps",
        dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob", init_std="initializer_range",
        image_size="image_size", patch_size="patch_size", num_channels="num_channels",
    ),
    defaults=dict(
        hidden_act="gelu", layer_norm_eps=1e-12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.02, image_size=224, patch_size=16, num_channels=3,
    ),
    read=_read,
    write=_write,
    rules=_rules,
    prefix="vit.",
    modules=(
        ("attention.attention.query", "attention.q_proj"), ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"), ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"), ("output.dense", "mlp.fc2"), ("encoder.layer.", "layers."),
    ),
)  # fmt: skip
