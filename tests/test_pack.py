"""Packed weights give the same products, follow the weights when these change, and are gone outside of generation."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers

import sublayer
from sublayer.core.heads import Logits
from sublayer.core.layers import Linear
from sublayer.generation import pack
from support import random_ids, small

LARGE = dict(d_model=256, d_ff=512, vocab_size=300)


def build(**changes) -> sublayer.models.Model:
    torch.manual_seed(0)
    return sublayer.build(small("llama-2-7b", **LARGE | changes)).eval()


def layers(model) -> list[Linear | Logits]:
    return [layer for layer in model.modules() if isinstance(layer, Linear | Logits)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_same(dtype):
    model = build().to(dtype).requires_grad_(False)
    ids = random_ids(2, 5)
    expected = model(ids)
    with pack.packed(model):
        assert all((layer.packed is not None) == (layer.weight.numel() >= pack.SMALLEST) for layer in layers(model))
        assert any(layer.packed is not None for layer in layers(model))
        found = model(ids)
    assert all(layer.packed is None for layer in layers(model))
    limits = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    torch.testing.assert_close(found, expected, **limits)


def test_answers_are_those_of_transformers(tmp_path):
    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=300, n_positions=64, eos_token_id=None)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3.0)
    theirs.save_pretrained(tmp_path)
    ids = random_ids(2, 9)
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 9:]
    model = sublayer.load_model(tmp_path)
    for _ in range(2):  # with new packs, and with those kept
        assert torch.equal(sublayer.generate(model, ids, max_new_tokens=20), expected)


@pytest.mark.parametrize("change", ["in place", "data", "parameter", "dtype"])
def test_weights_that_change_are_packed_anew(change):
    model, other = build(), build()
    ids = random_ids(1, 6)
    sublayer.generate(model, ids, max_new_tokens=3)
    for one in (model, other):
        layer = next(layer for layer in layers(one) if isinstance(layer, Linear))
        new = layer.weight.detach().flip(0) * 5
        if change == "in place":
            with torch.no_grad():
                layer.weight.copy_(new)
        elif change == "data":
            layer.weight.data = new
        elif change == "parameter":
            layer.weight = torch.nn.Parameter(new)
        else:
            one.to(torch.bfloat16)
    assert torch.equal(*(sublayer.generate(one, ids, max_new_tokens=12) for one in (model, other)))


def test_a_model_in_training_keeps_none():
    model = build()
    sublayer.generate(model, random_ids(1, 4), max_new_tokens=2)
    assert model in pack._packs
    model.train()
    sublayer.generate(model, random_ids(1, 4), max_new_tokens=2)
    assert model not in pack._packs
    loss = model(random_ids(1, 4)).sum()
    loss.backward()
    assert all(layer.weight.grad is not None for layer in layers(model))


def test_no_memory_no_packs(monkeypatch):
    model = build()
    monkeypatch.setattr(pack, "free_memory", lambda: 1000)
    with pack.packed(model):
        assert all(layer.packed is None for layer in layers(model))


def test_two_at_once():
    """The packs stay until the last one is done, and both answer as one alone."""
    model = build()
    prompts = [random_ids(1, 6, seed=seed) for seed in range(4)]
    expected = [sublayer.generate(model, ids, max_new_tokens=15) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def answer(number: int) -> None:
        found[number] = sublayer.generate(model, prompts[number], max_new_tokens=15)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(4))
    assert all(layer.packed is None for layer in layers(model))
