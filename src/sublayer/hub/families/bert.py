"""BERT, RoBERTa and DistilBERT: post-norm encoders with learned positions."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..family import Family, Values, labels, write_labels
from ..rules import Rule, rename
from ..tensors import CheckpointError

_FIXED: Values = dict(shape="encoder", placement="post", positions="learned", embedding_norm=True, init="truncated")
_SIZES = dict(
    vocab_size="vocab_size", d_model="hidden_size", d_ff="intermediate_size", num_heads="num_attention_heads",
    num_encoder_layers="num_hidden_layers", activation="hidden_act", norm_eps="layer_norm_eps",
    dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob", init_std="initializer_range",
    num_segments="type_vocab_size", pad_id="pad_token_id", bos_id="bos_token_id", eos_id="eos_token_id",
)  # fmt: skip
_DEFAULTS: Values = dict(
    pad_token_id=0, bos_token_id=None, eos_token_id=None, layer_norm_eps=1e-12, hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1, initializer_range=0.02, hidden_act="gelu", type_vocab_size=2,
)  # fmt: skip
_DEMANDS: Values = dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)


def _architectures(prefix: str, masked: str = "ForMaskedLM", pooler: str = "tanh") -> dict[str, Values]:
    """The first that fits is written: a body with a pooler and one without are the same class on disk."""
    head: dict[str, Values] = {
        f"{prefix}Model": dict(head="none"),
        f"{prefix}{masked}": dict(head="mlm", pooler="none", logits_bias="learned"),
        f"{prefix}ForSequenceClassification": dict(head="classifier", pooler=pooler),
        f"{prefix}ForTokenClassification": dict(head="token-classifier", pooler="none"),
        f"{prefix}ForQuestionAnswering": dict(head="span", pooler="none"),
    }
    return head


def _read(theirs: Values) -> Values:
    return dict(num_labels=labels(theirs), tie_embeddings=theirs.get("tie_word_embeddings", True), pooler="tanh")


def _write(config: ModelConfig) -> Values:
    return write_labels(config) | dict(tie_word_embeddings=config.tie_embeddings)


def _layer_rules(layer: str) -> list[Rule]:
    ours = "encoder.blocks.{i}."
    attention, feed_forward = ours + "attention.", ours + "feed_forward."
    return [
        *rename(f"{layer}attention.self.query", attention + "sublayer.query"),
        *rename(f"{layer}attention.self.key", attention + "sublayer.key"),
        *rename(f"{layer}attention.self.value", attention + "sublayer.value"),
        *rename(f"{layer}attention.output.dense", attention + "sublayer.output"),
        *rename(f"{layer}attention.output.LayerNorm", attention + "norm"),
        *rename(f"{layer}intermediate.dense", feed_forward + "sublayer.up"),
        *rename(f"{layer}output.dense", feed_forward + "sublayer.down"),
        *rename(f"{layer}output.LayerNorm", feed_forward + "norm"),
    ]


def _embedding_rules() -> list[Rule]:
    return [
        *rename("embeddings.word_embeddings", "encoder.embeddings.tokens", "weight"),
        *rename("embeddings.position_embeddings", "encoder.embeddings.positions", "weight"),
        *rename("embeddings.token_type_embeddings", "encoder.embeddings.segments", "weight"),
        *rename("embeddings.LayerNorm", "encoder.embeddings.norm"),
    ]


def _label_rules(config: ModelConfig) -> list[Rule]:
    stored = "qa_outputs" if config.head == "span" else "classifier"
    return rename(f"^{stored}", "head.classifier")


def _bert_rules(config: ModelConfig) -> list[Rule]:
    return [
        *_embedding_rules(),
        *_layer_rules("encoder.layer.{i}."),
        *rename("pooler.dense", "head.pooler.dense"),
        *rename("^cls.predictions.transform.dense", "head.dense"),
        *rename("^cls.predictions.transform.LayerNorm", "head.norm"),
        Rule("^cls.predictions.decoder.weight", ("head.logits.weight",)),
        Rule("^cls.predictions.bias", ("head.logits.bias",)),
        *_label_rules(config),
    ]


BERT = Family(
    model_type="bert",
    architectures=_architectures("Bert"),
    fixed=_FIXED,
    fields=_SIZES | dict(max_positions="max_position_embeddings"),
    defaults=_DEFAULTS,
    demands=_DEMANDS,
    read=_read,
    write=_write,
    rules=_bert_rules,
    prefix="bert.",
    copies=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    ignored=(r"(bert\.)?embeddings\.position_ids", r"cls\.seq_relationship\..*"),
)


# RoBERTa counts positions from the pad id: rows up to and including it are never used.


def _read_roberta(theirs: Values) -> Values:
    pad, positions = theirs.get("pad_token_id", 1), theirs.get("max_position_embeddings", 514)
    if not isinstance(pad, int) or not isinstance(positions, int) or isinstance(pad, bool):
        raise CheckpointError("config.json: pad_token_id and max_position_embeddings must be whole numbers")
    if theirs.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(
            f"config.json says hidden_act is {theirs['hidden_act']!r}; RoBERTa's heads use 'gelu' only"
        )
    return _read(theirs) | dict(position_offset=pad + 1, max_positions=positions - pad - 1)


def _write_roberta(config: ModelConfig) -> Values:
    offset = config.position_offset
    return _write(config) | dict(max_position_embeddings=config.max_positions + offset, pad_token_id=offset - 1)


def _roberta_rules(config: ModelConfig) -> list[Rule]:
    classifier = (
        [*rename("^classifier.dense", "head.pooler.dense"), *rename("^classifier.out_proj", "head.classifier")]
        if config.head == "classifier"
        else [*rename("pooler.dense", "head.pooler.dense"), *_label_rules(config)]
    )
    return [
        *_embedding_rules(),
        *_layer_rules("encoder.layer.{i}."),
        *rename("^lm_head.dense", "head.dense"),
        *rename("^lm_head.layer_norm", "head.norm"),
        Rule("^lm_head.decoder.weight", ("head.logits.weight",)),
        Rule("^lm_head.bias", ("head.logits.bias",)),
        *classifier,
    ]


ROBERTA = Family(
    model_type="roberta",
    architectures=_architectures("Roberta"),
    fixed=_FIXED,
    fields=_SIZES,
    defaults=_DEFAULTS | dict(pad_token_id=1, bos_token_id=0, eos_token_id=2),
    demands=_DEMANDS,
    read=_read_roberta,
    write=_write_roberta,
    rules=_roberta_rules,
    prefix="roberta.",
    copies=(("lm_head.decoder.bias", "lm_head.bias"),),
    ignored=(r"(roberta\.)?embeddings\.position_ids",),
)


def _read_distilbert(theirs: Values) -> Values:
    return dict(num_labels=labels(theirs), tie_embeddings=theirs.get("tie_word_embeddings", True), pooler="none")


def _distilbert_rules(config: ModelConfig) -> list[Rule]:
    layer, ours = "transformer.layer.{i}.", "encoder.blocks.{i}."
    attention = ours + "attention."
    return [
        *_embedding_rules(),
        *rename(f"{layer}attention.q_lin", attention + "sublayer.query"),
        *rename(f"{layer}attention.k_lin", attention + "sublayer.key"),
        *rename(f"{layer}attention.v_lin", attention + "sublayer.value"),
        *rename(f"{layer}attention.out_lin", attention + "sublayer.output"),
        *rename(f"{layer}sa_layer_norm", attention + "norm"),
        *rename(f"{layer}ffn.lin1", ours + "feed_forward.sublayer.up"),
        *rename(f"{layer}ffn.lin2", ours + "feed_forward.sublayer.down"),
        *rename(f"{layer}output_layer_norm", ours + "feed_forward.norm"),
        *rename("^vocab_transform", "head.dense"),
        *rename("^vocab_layer_norm", "head.norm"),
        Rule("^vocab_projector.weight", ("head.logits.weight",)),
        Rule("^vocab_projector.bias", ("head.logits.bias",)),
        *rename("^pre_classifier", "head.pooler.dense"),
        *_label_rules(config),
    ]


_DISTILBERT_FIELDS: dict[str, Any] = dict(
    vocab_size="vocab_size", d_model="dim", d_ff="hidden_dim", num_heads="n_heads", num_encoder_layers="n_layers",
    activation="activation", dropout="dropout", attention_dropout="attention_dropout", init_std="initializer_range",
    max_positions="max_position_embeddings", pad_id="pad_token_id", bos_id="bos_token_id", eos_id="eos_token_id",
)  # fmt: skip

DISTILBERT = Family(
    model_type="distilbert",
    architectures=_architectures("DistilBert", pooler="relu"),
    fixed=_FIXED | dict(norm_eps=1e-12, num_segments=0),
    fields=_DISTILBERT_FIELDS,
    defaults=dict(
        pad_token_id=0, bos_token_id=None, eos_token_id=None, activation="gelu", dropout=0.1, attention_dropout=0.1,
        initializer_range=0.02, max_position_embeddings=512,
    ),
    read=_read_distilbert,
    write=_write,
    rules=_distilbert_rules,
    prefix="distilbert.",
    ignored=(r"(distilbert\.)?embeddings\.position_ids",),
)  # fmt: skip
