"""The published parameter counts, exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sublayer

PUBLISHED = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "flan-t5-base": 247_577_856,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "minilm-l6": 22_713_216,
    "minilm-l12": 33_360_000,
    "distilbert-base": 66_362_880,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "distilgpt2": 81_912_576,
    "vit-ti-16": 5_717_416,
    "vit-s-16": 22_050_664,
    "vit-b-32": 88_224_232,
    "vit-l-32": 306_535_400,
    "vit-h-14": 632_045_800,
    # Published as 74,410,496, which counts two tables of 512 × 512 sinusoids.
    "opus-mt-en-de": 74_410_496 - 2 * 512 * 512,
}


def original(d, d_ff, layers=6, vocab=37_000):
    """From the paper's formulas: 4·d² a attention, 2·d·d_ff a feed-forward network, one matrix of embeddings."""
    attention, feed_forward = 4 * d**2, 2 * d * d_ff + d_ff + d
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return vocab * d + layers * (encoder_layer + decoder_layer)


@pytest.mark.parametrize("name", sublayer.presets())
def test_parameter_counts(name):
    expected = PUBLISHED | {"original-base": original(512, 2048), "original-big": original(1024, 4096)}
    assert sublayer.build(sublayer.preset(name), device="meta").num_parameters() == expected[name]


def test_the_largest_model_allocates_nothing_on_meta():
    model = sublayer.build(sublayer.preset("llama-2-70b"), device="meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="unknown preset 'gpt-2'; did you mean 'gpt2'"):
        sublayer.preset("gpt-2")


def test_weights_are_float32_on_the_cpu_unless_told_otherwise():
    model = sublayer.build(sublayer.preset("bert-tiny"))
    assert model.dtype == torch.float32
    assert model.device.type == torch.get_default_device().type
    half = sublayer.build(sublayer.preset("bert-tiny"), dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["bert-tiny", "vit-ti-16", "t5-small", "opus-mt-en-de", "smollm2-135m", "distilgpt2"])
def test_no_parameter_is_left_without_an_initial_value(name):
    """With deterministic algorithms on, torch fills memory that nobody set with NaN."""
    config = sublayer.preset(name)
    config = dataclasses.replace(config, vocab_size=min(config.vocab_size, 500), pad_id=None, start_id=None)
    config = dataclasses.replace(config, norm="batchnorm", logits_bias="learned")
    torch.use_deterministic_algorithms(True)
    try:
        model = sublayer.build(config)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), key
