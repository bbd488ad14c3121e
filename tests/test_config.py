"""What a configuration refuses, and in which words."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from tests.support import random_ids, small

import sublayer
from sublayer import ModelConfig, Packing, RotaryScaling

GPT = dataclasses.asdict(small("gpt2"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, ["num_heads 5", "d_model 32", "head_dim"]),
        ({"num_kv_heads": 3}, ["num_kv_heads 3", "num_heads 4"]),
        ({"norms": "layernorm"}, ["'norms'", "did you mean 'norm'"]),
        ({"norm": "layer_norm"}, ["'layer_norm'", "did you mean 'layernorm'"]),
        ({"positions": "rotary", "head_dim": 7}, ["7", "even"]),
        ({"positions": "rotary", "head_dim": 8, "rotary_fraction": 0.4}, ["3 of head_dim 8", "even"]),
        ({"positions": "sinusoidal", "d_model": 33, "num_heads": 3}, ["33", "odd"]),
        ({"d_model": 0}, ["d_model is 0", "at least 1"]),
        ({"d_model": "32"}, ["d_model is '32'", "int"]),
        ({"d_ff": True}, ["d_ff is True", "int"]),
        ({"norm_eps": float("nan")}, ["norm_eps", "finite"]),
        ({"gated": 1}, ["gated is 1", "bool"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
        ({"num_decoder_layers": 0}, ["num_decoder_layers is 0", "at least 1"]),
        ({"num_encoder_layers": 2}, ["num_encoder_layers is 2", "no encoder"]),
        ({"head": "classifier", "num_labels": 2}, ["'classifier'", "encoder"]),
        ({"vocab_size": 0}, ["vocab_size is 0"]),
        ({"patch_size": 8}, ["image_size and patch_size go together"]),
        ({"patch_size": 8, "image_size": 24}, ["shape must be 'encoder'"]),
        ({"target_vocab_size": 9}, ["encoder-decoder"]),
        ({"pooler": "tanh"}, ["pooler", "none"]),
        ({"window_layers": (0,)}, ["window_layers", "needs a window"]),
        ({"window": 4, "window_layers": (2,)}, ["layers from 0 to 1"]),
        ({"rotary_scaling": {"kind": "ntk", "factor": 2.0}}, ["'ntk'"]),
        ({"rotary_scaling": {"kind": "yarn", "factor": 2.0}}, ["original_max_positions"]),
        ({"rotary_scaling": {"kind": "linear", "factor": 0.5}}, ["0.5", "at least 1.0"]),
        ({"rotary_scaling": {"kind": "linear", "factr": 2.0}}, ["'factr'", "did you mean 'factor'"]),
        ({"positions": "relative", "relative_buckets": 5}, ["relative_buckets is 5", "even"]),
        ({"rotary_scaling": {"kind": "linear"}}, ["RotaryScaling lacks 'factor'"]),
        ({"rotary_scaling": {"kind": "linear", "factor": "2"}}, ["factor is '2'", "finite number"]),
        ({"rotary_fraction": 1.5}, ["rotary_fraction is 1.5", "at most 1"]),
        ({"num_segments": -1}, ["num_segments is -1"]),
    ],
)
def test_bad_configurations_name_the_value_the_rule_and_the_remedy(changes, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        ModelConfig.from_dict(GPT | changes)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_bad_configurations_of_encoders():
    with pytest.raises(ValueError, match="an encoder sees the token it would predict"):
        small("bert-base", head="lm", pooler="none")
    with pytest.raises(ValueError, match="patch_size 7 does not divide image_size 24"):
        small("vit-b-16", patch_size=7)
    with pytest.raises(ValueError, match="reads images"):
        small("vit-b-16", head="mlm")
    with pytest.raises(ValueError, match="share_embeddings=False"):
        small("t5-base", target_vocab_size=50)


@pytest.mark.parametrize("name", sublayer.presets())
def test_json_round_trip(name):
    config = sublayer.preset(name)
    assert ModelConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["d_model"] == config.d_model


def test_json_nonsense():
    with pytest.raises(ValueError, match="ModelConfig lacks 'd_model'"):
        ModelConfig.from_dict({"shape": "decoder"})
    for text in ("{", "[]", "3", "null"):
        with pytest.raises(ValueError, match="configuration"):
            ModelConfig.from_json(text)


def test_a_configuration_is_frozen_and_a_variant_stays_consistent():
    config = sublayer.preset("gpt2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 5
    assert dataclasses.replace(config, d_model=96).head_size == 8
    assert dataclasses.replace(config, num_heads=6).kv_heads == 6
    scaled = dataclasses.replace(config, rotary_scaling=RotaryScaling(kind="linear", factor=2.0))
    assert hash(scaled) != hash(config)


def test_inputs_that_do_not_fit_the_model():
    model = sublayer.build(small("gpt2"))
    for ids, words in (
        (torch.tensor([[3, 61]]), "token id 61 is outside the vocabulary of 61"),
        (torch.tensor([[3, -1]]), "token id -1 is outside"),
        (torch.rand(1, 3), "whole numbers"),
        (random_ids(1, 49), "49 tokens is longer than the 48 positions"),
    ):
        with pytest.raises(ValueError, match=words):
            model(ids)
    with pytest.raises(ValueError, match=r"expected torch.bool of shape \(1, 3\)"):
        model(random_ids(1, 3), mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"expected torch\.bool of shape"):
        model(random_ids(1, 3), mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="longer than the 48 positions"):
        model.make_cache(1, 49)
    with pytest.raises(ValueError, match="longer than the 48 positions"):
        sublayer.generate(model, random_ids(1, 40), max_new_tokens=10)
    assert sublayer.generate(model, random_ids(1, 40), max_new_tokens=9, eos_id=-1).shape == (1, 9)
    holes = torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(random_ids(1, 3), mask=holes)
    with pytest.raises(ValueError, match="a batch of 1 does not fit a cache of 2 rows"):
        model(random_ids(1, 3), cache=model.make_cache(2, 4))
    for shape in ((3,), (1, 0)):
        with pytest.raises(ValueError, match=r"expected \(batch, tokens\)"):
            model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="packing is of 7 tokens, and 5 were given"):
        model(random_ids(5), packing=Packing.from_lengths([3, 4]))
    with pytest.raises(ValueError, match="expected one dimension"):
        model(random_ids(1, 5), packing=Packing.from_lengths([5]))
    with pytest.raises(ValueError, match="every prompt needs at least one"):
        sublayer.generate(model, random_ids(2, 3), mask=torch.tensor([[True] * 3, [False] * 3]), max_new_tokens=2)
    with pytest.raises(ValueError, match="needs a model with head 'lm'"):
        sublayer.generate(sublayer.build(small("gpt2", head="none")), random_ids(1, 3), max_new_tokens=2)
    with pytest.raises(ValueError, match="segment id 5 is outside"):
        sublayer.build(small("bert-base"))(random_ids(1, 1), token_types=torch.tensor([[5]]))
    wide = torch.cat((random_ids(1, 20), random_ids(1, 40)), 1)
    assert model(wide, mask=torch.arange(60)[None] >= 20).isfinite().all()
    with pytest.raises(ValueError, match="does not fit into a cache of 4"):
        model(random_ids(1, 5), cache=model.make_cache(1, 4))
    with pytest.raises(ValueError, match="no segments"):
        sublayer.build(small("bert-base", num_segments=0))(random_ids(1, 3), token_types=torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match="multiples of the patch size 8"):
        sublayer.build(small("vit-b-16"))(torch.rand(1, 3, 20, 24))
    with pytest.raises(ValueError, match="keeps no cache"):
        sublayer.build(small("bert-base")).make_cache(1, 4)
    translator, packing = sublayer.build(small("t5-base")), Packing.from_lengths([3])
    with pytest.raises(ValueError, match="both be packed"):
        translator(random_ids(3), random_ids(1, 3), source_packing=packing)
    with pytest.raises(ValueError, match="at least one token"):
        Packing.from_lengths([3, 0])
    with pytest.raises(ValueError, match="only a cache that has seen the source"):
        translator(None, random_ids(1, 3))
    with pytest.raises(ValueError, match="holds no source yet"):
        translator(None, random_ids(1, 3), cache=translator.make_cache(1, 4))
    with pytest.raises(ValueError, match="unknown dtype 'float31'; did you mean"):
        sublayer.build(small("gpt2"), dtype="float31")
