"""Public checkpoints against `transformers`: random models of every architecture, over many shapes and settings."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from safetensors.torch import load_file

import sublayer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
VOCAB = 40


def encoder_sizes(draw: Any) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * draw(st.sampled_from([4, 6])),
        "num_attention_heads": heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(st.sampled_from([8, 20])),
        "max_position_embeddings": 32,
        "hidden_act": draw(st.sampled_from(["gelu", "relu", "gelu_new", "silu"])),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-5])),
    }


@st.composite
def bert(draw: Any) -> tuple[Any, Any]:
    names = ["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"]
    name = draw(st.sampled_from([*names, "BertForQuestionAnswering"]))
    config = transformers.BertConfig(**encoder_sizes(draw), type_vocab_size=draw(st.sampled_from([1, 2])))
    config.num_labels = draw(st.sampled_from([2, 3])) if "QuestionAnswering" not in name else 2
    return name, config


@st.composite
def roberta(draw: Any) -> tuple[Any, Any]:
    name = draw(st.sampled_from(["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]))
    sizes = encoder_sizes(draw) | {"hidden_act": "gelu"}
    return f"Roberta{name}", transformers.RobertaConfig(**sizes, pad_token_id=draw(st.sampled_from([0, 1])))


@st.composite
def distilbert(draw: Any) -> tuple[Any, Any]:
    name = draw(st.sampled_from(["Model", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering"]))
    heads = draw(st.sampled_from([1, 2]))
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=heads * 6, n_heads=heads, n_layers=draw(st.integers(1, 3)), hidden_dim=20,
        max_position_embeddings=32, activation=draw(st.sampled_from(["gelu", "relu"])),
    )  # fmt: skip
    return f"DistilBert{name}", config


@st.composite
def gpt2(draw: Any) -> tuple[Any, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=heads * 6, n_head=heads, n_layer=draw(st.integers(1, 3)), n_positions=32,
        n_inner=draw(st.sampled_from([None, 10])), tie_word_embeddings=draw(st.booleans()),
        scale_attn_weights=draw(st.booleans()), activation_function=draw(st.sampled_from(["gelu_new", "gelu", "relu"])),
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return draw(st.sampled_from(["GPT2LMHeadModel", "GPT2Model"])), config


def llama_sizes(draw: Any) -> dict[str, Any]:
    heads = draw(st.sampled_from([2, 4]))
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([10_000.0, 500_000.0]))}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 8
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, heads])),
        "head_dim": draw(st.sampled_from([8, 12])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(st.sampled_from([10, 24])),
        "max_position_embeddings": 32,
        "rope_parameters": rope,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 0,
        "eos_token_id": draw(st.sampled_from([1, [1, 2]])),
    }


@st.composite
def llama(draw: Any) -> tuple[Any, Any]:
    more = {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    name = draw(st.sampled_from(["LlamaForCausalLM", "LlamaModel"]))
    return name, transformers.LlamaConfig(**llama_sizes(draw), **more)


@st.composite
def mistral(draw: Any) -> tuple[Any, Any]:
    window = draw(st.sampled_from([None, 3, 64]))
    return "MistralForCausalLM", transformers.MistralConfig(**llama_sizes(draw), sliding_window=window)


@st.composite
def qwen(draw: Any) -> tuple[Any, Any]:
    cls = draw(st.sampled_from([transformers.Qwen2Config, transformers.Qwen3Config]))
    window = {"use_sliding_window": draw(st.booleans()), "sliding_window": 3, "max_window_layers": 1}
    if cls is transformers.Qwen3Config:
        window["attention_bias"] = draw(st.booleans())
    return cls.__name__.replace("Config", "ForCausalLM"), cls(**llama_sizes(draw), **window)


@st.composite
def t5(draw: Any) -> tuple[Any, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": 16, "d_kv": draw(st.sampled_from([4, 6])), "num_heads": heads, "d_ff": 20,
        "num_layers": draw(st.integers(1, 3)), "num_decoder_layers": draw(st.integers(1, 3)),
        "relative_attention_num_buckets": draw(st.sampled_from([8, 32])), "relative_attention_max_distance": 20,
        "feed_forward_proj": draw(st.sampled_from(["relu", "gated-gelu", "gated-silu"])), "decoder_start_token_id": 0,
    }  # fmt: skip
    name = draw(st.sampled_from(["T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5EncoderModel"]))
    if name.startswith("MT5"):
        return name, transformers.MT5Config(**sizes)
    return name, transformers.T5Config(**sizes, tie_word_embeddings=draw(st.booleans()))


def bart_sizes(draw: Any) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "vocab_size": VOCAB, "d_model": heads * 6, "encoder_layers": draw(st.integers(1, 2)),
        "decoder_layers": draw(st.integers(1, 3)), "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32, "pad_token_id": 1,
        "decoder_start_token_id": 2, "eos_token_id": 2, "scale_embedding": draw(st.booleans()),
        "activation_function": draw(st.sampled_from(["gelu", "silu", "relu"])),
    }  # fmt: skip


@st.composite
def bart(draw: Any) -> tuple[Any, Any]:
    name = draw(st.sampled_from(["BartForConditionalGeneration", "BartModel"]))
    return name, transformers.BartConfig(**bart_sizes(draw))


@st.composite
def marian(draw: Any) -> tuple[Any, Any]:
    shared = draw(st.booleans())
    sizes = bart_sizes(draw) | {"share_encoder_decoder_embeddings": shared}
    if not shared:
        sizes["decoder_vocab_size"] = draw(st.sampled_from([VOCAB, 33]))
        sizes["tie_word_embeddings"] = draw(st.booleans())
    return "MarianMTModel", transformers.MarianConfig(**sizes)


@st.composite
def vit(draw: Any) -> tuple[Any, Any]:
    sizes = encoder_sizes(draw)
    sizes = {key: value for key, value in sizes.items() if key not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=24, patch_size=8, qkv_bias=draw(st.booleans()))
    config.num_labels = 3
    return draw(st.sampled_from(["ViTForImageClassification", "ViTModel"])), config


STRATEGIES = {
    "bert": bert(), "roberta": roberta(), "distilbert": distilbert(), "gpt2": gpt2(), "llama": llama(),
    "mistral": mistral(), "qwen": qwen(), "t5": t5(), "bart": bart(), "marian": marian(), "vit": vit(),
}  # fmt: skip


def reference(name: str, config: Any, seed: int = 0) -> Any:
    """A random model whose norms, biases and buffers are random too."""
    torch.manual_seed(seed)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "embed_positions" in key and "Marian" in name:
                continue
            if tensor.is_floating_point() and "inv_freq" not in key:
                tensor.copy_(
                    torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in key.lower() and tensor.dim() == 1 else 0)
                )
    model.tie_weights()
    return model


def inputs_of(model: Any, padded: bool) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """The same inputs for theirs (keywords) and ours (positional and keywords)."""
    config = model.config
    if config.model_type == "vit":
        pixels = torch.rand(2, 3, 24, 24)
        return {"pixel_values": pixels}, (pixels,), {}
    ids = torch.randint(3, VOCAB, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    if padded:
        mask[1, 5:] = False
        ids[1, 5:] = config.pad_token_id if config.pad_token_id is not None else 0
    pair = bool(config.is_encoder_decoder) and "Encoder" not in type(model).__name__
    theirs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long()}
    if not pair:
        return theirs, (ids,), {"mask": mask} if padded else {}
    target = torch.randint(3, min(VOCAB, getattr(config, "decoder_vocab_size", None) or VOCAB), (2, 6))
    return theirs | {"decoder_input_ids": target}, (ids, target), {"source_mask": mask} if padded else {}


def answer(out: Any) -> torch.Tensor:
    if getattr(out, "start_logits", None) is not None:
        return torch.stack((out.start_logits, out.end_logits), -1)
    logits = getattr(out, "logits", None)
    return out.last_hidden_state if logits is None else logits


def check_equal(theirs: Any, ours: Any, seed: int) -> None:
    for padded in (False, True):
        torch.manual_seed(seed)
        keywords, inputs, masks = inputs_of(theirs, padded)
        with torch.no_grad():
            expected, out = answer(theirs(**keywords)), ours(*inputs, **masks)
        if padded and "input_ids" in keywords and len(inputs) == 1 and out.dim() == 3:
            real = keywords["attention_mask"].bool()
            expected, out = expected[real], out[real]
        scale = float(expected.abs().max())
        torch.testing.assert_close(out / scale, expected / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", STRATEGIES)
def test_architecture(family):
    @given(STRATEGIES[family], st.integers(0, 99))
    @settings(max_examples=12)
    def check(drawn, seed):
        name, config = drawn
        theirs = reference(name, config, seed)
        if name == "LlamaForCausalLM" or family in ("mistral", "qwen"):
            dynamic = config.rope_parameters["rope_type"] == "dynamic"
            config.max_position_embeddings = 32 if dynamic else config.max_position_embeddings
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            theirs.save_pretrained(first)
            ours = sublayer.load_model(first)
            assert not ours.training
            check_equal(theirs, ours, seed)

            sublayer.save_model(ours, second)
            before, after = (load_file(Path(folder) / "model.safetensors") for folder in (first, second))
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)

            again, info = getattr(transformers, name).from_pretrained(
                second, output_loading_info=True, attn_implementation="eager"
            )
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            check_equal(again.eval(), ours, seed)

    check()
