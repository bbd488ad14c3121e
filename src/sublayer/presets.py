"""Named sizes of every family. A family is a set of choices at the four seams; a size fills in the numbers."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig, RotaryScaling, unknown

ORIGINAL: dict[str, Any] = dict(  # Vaswani et al. 2017
    shape="encoder-decoder", vocab_size=37_000, activation="relu", placement="post", positions="sinusoidal",
    max_positions=1024, embedding_scale=True, head="lm", tie_embeddings=True, attention_bias=False,
    attention_output_bias=False, init="xavier", norm_eps=1e-6, pad_id=0, eos_id=1, start_id=0,
)  # fmt: skip

BERT: dict[str, Any] = dict(  # Devlin et al. 2018
    shape="encoder", vocab_size=30_522, activation="gelu", norm_eps=1e-12, placement="post", positions="learned",
    max_positions=512, num_segments=2, embedding_norm=True, pooler="tanh", dropout=0.1, attention_dropout=0.1,
    init="truncated", pad_id=0,
)  # fmt: skip
ROBERTA = BERT | dict(vocab_size=50_265, norm_eps=1e-5, num_segments=1, position_offset=2, pad_id=1, bos_id=0, eos_id=2)
DISTILBERT = BERT | dict(num_segments=0, pooler="none")

GPT2: dict[str, Any] = dict(  # Radford et al. 2019
    shape="decoder", vocab_size=50_257, activation="gelu-tanh", placement="pre", final_norm=True, positions="learned",
    max_positions=1024, head="lm", tie_embeddings=True, dropout=0.1, attention_dropout=0.1, init="normal",
    init_depth_scaled=True, bos_id=50_256, eos_id=50_256,
)  # fmt: skip

LLAMA: dict[str, Any] = dict(  # Touvron et al. 2023
    shape="decoder", vocab_size=32_000, activation="silu", gated=True, ffn_bias=False, attention_bias=False,
    attention_output_bias=False, norm="rmsnorm", norm_eps=1e-6, placement="pre", final_norm=True, positions="rotary",
    max_positions=2048, head="lm", init="normal", bos_id=1, eos_id=2,
)  # fmt: skip
LLAMA2 = LLAMA | dict(norm_eps=1e-5, max_positions=4096)
LLAMA3 = LLAMA | dict(
    norm_eps=1e-5, vocab_size=128_256, max_positions=8192, rotary_base=500_000.0, bos_id=128_000, eos_id=128_001
)
LLAMA31 = LLAMA3 | dict(
    max_positions=131_072, rotary_scaling=RotaryScaling(kind="llama3", factor=8.0, original_max_positions=8192)
)
LLAMA32 = LLAMA31 | dict(
    tie_embeddings=True,
    rotary_scaling=RotaryScaling(kind="llama3", factor=32.0, original_max_positions=8192),
)
SMOLLM2 = LLAMA | dict(
    vocab_size=49_152, norm_eps=1e-5, max_positions=8192, rotary_base=100_000.0, tie_embeddings=True, bos_id=0, eos_id=0
)
MISTRAL = LLAMA | dict(norm_eps=1e-5, max_positions=32_768, window=4096)
QWEN2 = LLAMA | dict(
    vocab_size=151_936, attention_bias=True, max_positions=131_072, rotary_base=1e6, bos_id=151_643, eos_id=151_643
)
QWEN3 = LLAMA | dict(
    vocab_size=151_936, qk_norm=True, head_dim=128, max_positions=40_960, rotary_base=1e6, bos_id=151_643,
    eos_id=151_645,
)  # fmt: skip

T5: dict[str, Any] = dict(  # Raffel et al. 2019
    shape="encoder-decoder", vocab_size=32_128, activation="relu", ffn_bias=False, attention_bias=False,
    attention_output_bias=False, attention_scale=1.0, head_dim=64, norm="rmsnorm", norm_eps=1e-6, placement="pre",
    final_norm=True, positions="relative", head="lm", tie_embeddings=True, dropout=0.1, attention_dropout=0.1,
    ffn_dropout=0.1, init="fan-in", pad_id=0, eos_id=1, start_id=0,
)  # fmt: skip
T5_1_1 = T5 | dict(activation="gelu-tanh", gated=True, tie_embeddings=False)
MT5 = T5_1_1 | dict(vocab_size=250_112)

BART: dict[str, Any] = dict(  # Lewis et al. 2019
    shape="encoder-decoder", vocab_size=50_265, activation="gelu", placement="post", positions="learned",
    max_positions=1024, position_offset=2, embedding_norm=True, head="lm", tie_embeddings=True, logits_bias="fixed",
    dropout=0.1, attention_dropout=0.0, init="normal", pad_id=1, bos_id=0, eos_id=2, start_id=2,
)  # fmt: skip
MARIAN: dict[str, Any] = dict(  # Junczys-Dowmunt et al. 2018
    shape="encoder-decoder", activation="silu", placement="post", positions="sinusoidal-block", max_positions=512,
    embedding_scale=True, head="lm", tie_embeddings=True, logits_bias="fixed", dropout=0.1, init="normal", eos_id=0,
)  # fmt: skip

VIT: dict[str, Any] = dict(  # Dosovitskiy et al. 2020
    shape="encoder", activation="gelu", norm_eps=1e-12, placement="pre", final_norm=True, positions="learned",
    image_size=224, head="classifier", num_labels=1000, init="truncated",
)  # fmt: skip


def _t5_size(d_model: int, *numbers: int, **more: Any) -> dict[str, Any]:
    """Where T5 ties its matrices, it shrinks the logits to make up for the embeddings' unit variance."""
    return _size(d_model, *numbers, logits_scale=d_model**-0.5, **more)


def _size(d_model: int, heads: int, d_ff: int, layers: int, **more: Any) -> dict[str, Any]:
    return dict(d_model=d_model, num_heads=heads, d_ff=d_ff, layers=layers, **more)


_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "original-base": (ORIGINAL, _size(512, 8, 2048, 6, dropout=0.1)),
    "original-big": (ORIGINAL, _size(1024, 16, 4096, 6, dropout=0.3)),
    "bert-tiny": (BERT, _size(128, 2, 512, 2)),
    "bert-mini": (BERT, _size(256, 4, 1024, 4)),
    "bert-small": (BERT, _size(512, 8, 2048, 4)),
    "bert-medium": (BERT, _size(512, 8, 2048, 8)),
    "bert-base": (BERT, _size(768, 12, 3072, 12)),
    "bert-large": (BERT, _size(1024, 16, 4096, 24)),
    "minilm-l6": (BERT, _size(384, 12, 1536, 6)),
    "minilm-l12": (BERT, _size(384, 12, 1536, 12)),
    "distilbert-base": (DISTILBERT, _size(768, 12, 3072, 6)),
    "roberta-base": (ROBERTA, _size(768, 12, 3072, 12)),
    "roberta-large": (ROBERTA, _size(1024, 16, 4096, 24)),
    "distilgpt2": (GPT2, _size(768, 12, 3072, 6)),
    "gpt2": (GPT2, _size(768, 12, 3072, 12)),
    "gpt2-medium": (GPT2, _size(1024, 16, 4096, 24)),
    "gpt2-large": (GPT2, _size(1280, 20, 5120, 36)),
    "gpt2-xl": (GPT2, _size(1600, 25, 6400, 48)),
    "llama-7b": (LLAMA, _size(4096, 32, 11_008, 32)),
    "llama-13b": (LLAMA, _size(5120, 40, 13_824, 40)),
    "llama-30b": (LLAMA, _size(6656, 52, 17_920, 60)),
    "llama-65b": (LLAMA, _size(8192, 64, 22_016, 80, norm_eps=1e-5)),
    "llama-2-7b": (LLAMA2, _size(4096, 32, 11_008, 32)),
    "llama-2-13b": (LLAMA2, _size(5120, 40, 13_824, 40)),
    "llama-2-70b": (LLAMA2, _size(8192, 64, 28_672, 80, num_kv_heads=8)),
    "llama-3-8b": (LLAMA3, _size(4096, 32, 14_336, 32, num_kv_heads=8)),
    "llama-3-70b": (LLAMA3, _size(8192, 64, 28_672, 80, num_kv_heads=8)),
    "llama-3.1-8b": (LLAMA31, _size(4096, 32, 14_336, 32, num_kv_heads=8)),
    "llama-3.1-70b": (LLAMA31, _size(8192, 64, 28_672, 80, num_kv_heads=8)),
    "llama-3.2-1b": (LLAMA32, _size(2048, 32, 8192, 16, num_kv_heads=8)),
    "llama-3.2-3b": (LLAMA32, _size(3072, 24, 8192, 28, num_kv_heads=8)),
    "tinyllama-1.1b": (LLAMA2, _size(2048, 32, 5632, 22, num_kv_heads=4, max_positions=2048)),
    "smollm2-135m": (SMOLLM2, _size(576, 9, 1536, 30, num_kv_heads=3)),
    "smollm2-360m": (SMOLLM2, _size(960, 15, 2560, 32, num_kv_heads=5)),
    "smollm2-1.7b": (SMOLLM2, _size(2048, 32, 8192, 24, rotary_base=130_000.0)),
    "mistral-7b": (MISTRAL, _size(4096, 32, 14_336, 32, num_kv_heads=8)),
    "qwen2.5-0.5b": (QWEN2, _size(896, 14, 4864, 24, num_kv_heads=2, tie_embeddings=True, max_positions=32_768)),
    "qwen2.5-1.5b": (QWEN2, _size(1536, 12, 8960, 28, num_kv_heads=2, tie_embeddings=True)),
    "qwen2.5-7b": (QWEN2, _size(3584, 28, 18_944, 28, num_kv_heads=4, vocab_size=152_064)),
    "qwen3-0.6b": (QWEN3, _size(1024, 16, 3072, 28, num_kv_heads=8, tie_embeddings=True)),
    "qwen3-1.7b": (QWEN3, _size(2048, 16, 6144, 28, num_kv_heads=8, tie_embeddings=True)),
    "qwen3-4b": (QWEN3, _size(2560, 32, 9728, 36, num_kv_heads=8, tie_embeddings=True)),
    "qwen3-8b": (QWEN3, _size(4096, 32, 12_288, 36, num_kv_heads=8)),
    "t5-small": (T5, _t5_size(512, 8, 2048, 6)),
    "t5-base": (T5, _t5_size(768, 12, 3072, 12)),
    "t5-large": (T5, _t5_size(1024, 16, 4096, 24)),
    "t5-3b": (T5, _t5_size(1024, 32, 16_384, 24, head_dim=128)),
    "t5-11b": (T5, _t5_size(1024, 128, 65_536, 24, head_dim=128)),
    "flan-t5-small": (T5_1_1, _size(512, 6, 1024, 8)),
    "flan-t5-base": (T5_1_1, _size(768, 12, 2048, 12)),
    "flan-t5-large": (T5_1_1, _size(1024, 16, 2816, 24)),
    "flan-t5-xl": (T5_1_1, _size(2048, 32, 5120, 24)),
    "flan-t5-xxl": (T5_1_1, _size(4096, 64, 10_240, 24)),
    "mt5-small": (MT5, _size(512, 6, 1024, 8)),
    "mt5-base": (MT5, _size(768, 12, 2048, 12)),
    "bart-base": (BART, _size(768, 12, 3072, 6, attention_dropout=0.1)),
    "bart-large": (BART, _size(1024, 16, 4096, 12)),
    "opus-mt-en-de": (MARIAN, _size(512, 8, 2048, 6, vocab_size=58_101, pad_id=58_100, start_id=58_100)),
    "vit-ti-16": (VIT, _size(192, 3, 768, 12, patch_size=16)),
    "vit-s-16": (VIT, _size(384, 6, 1536, 12, patch_size=16)),
    "vit-b-16": (VIT, _size(768, 12, 3072, 12, patch_size=16)),
    "vit-b-32": (VIT, _size(768, 12, 3072, 12, patch_size=32)),
    "vit-l-16": (VIT, _size(1024, 16, 4096, 24, patch_size=16)),
    "vit-l-32": (VIT, _size(1024, 16, 4096, 24, patch_size=32)),
    "vit-h-14": (VIT, _size(1280, 16, 5120, 32, patch_size=14)),
}


def presets() -> list[str]:
    """The names `preset` knows."""
    return list(_SIZES)


def preset(name: str) -> ModelConfig:
    """The configuration of a published model, by its usual name."""
    if name not in _SIZES:
        raise ValueError(unknown("preset", name, presets()))
    family, size = _SIZES[name]
    fields = family | size
    layers = fields.pop("layers")
    if "encoder" in fields["shape"].split("-"):
        fields["num_encoder_layers"] = layers
    if "decoder" in fields["shape"].split("-"):
        fields["num_decoder_layers"] = layers
    return ModelConfig(**fields)
