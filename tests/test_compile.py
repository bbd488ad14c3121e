"""`torch.compile(fullgraph=True)` for every family: one graph in training, and one for all steps of cached decoding."""

from __future__ import annotations

import os

import pytest
import torch
from tests.support import CAUSAL_FAMILIES, FAMILIES, TEXT_FAMILIES, example, model_of, random_ids, small
from torch._dynamo.testing import CompileCounterWithBackend

from sublayer import Packing
from sublayer.core.layout import trusting
from sublayer.generation.replay import compile_blocks, mark_lengths

# The tracer is what breaks graphs; the code generator behind it is tried by the slow test and on a GPU.
BACKEND = os.environ.get("SUBLAYER_TEST_BACKEND", "aot_eager")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def check_training(name, backend):
    config = small(name, attention_dropout=0.0)
    model, inputs = model_of(config), example(config)
    expected = model(*inputs)
    expected.square().mean().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    out = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.square().mean().backward()
    for key, parameter in model.named_parameters():
        if key in gradients:
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-3, atol=1e-5)


def check_decoding(name, backend):
    model = model_of(small(name))
    ids = random_ids(2, 12)
    source = (random_ids(2, 5),) if model.config.shape == "encoder-decoder" else ()
    expected = model(*source, ids)
    cache = model.make_cache(2, 12)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        parts = [model(*source, ids[:, :4], cache=cache)]
        later = (None,) if source else ()
        parts += [step(*later, ids[:, place : place + 1], cache=cache) for place in range(4, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 1, "a step was compiled again as the sequence grew"


@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_one_graph(name):
    check_training(name, BACKEND)


@pytest.mark.parametrize("name", CAUSAL_FAMILIES)
def test_cached_decoding_is_compiled_once(name):
    check_decoding(name, BACKEND)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_packed_batches_compile(name):
    model = model_of(small(name))
    packing, ids = Packing.from_lengths([4, 7, 1]), random_ids(12)
    inputs, packings = (ids,), {"packing": packing}
    if model.config.shape == "encoder-decoder":
        inputs, packings = (ids, ids), {"source_packing": packing, "target_packing": packing}
    expected = model(*inputs, **packings)
    out = torch.compile(model, fullgraph=True, backend=BACKEND)(*inputs, **packings)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "t5-base"])
def test_generated_code(name):
    check_training(name, "inductor")
    torch._dynamo.reset()
    check_decoding(name, "inductor")


@pytest.mark.parametrize("name", CAUSAL_FAMILIES)
def test_blocks_are_compiled_once_for_all_layers_and_lengths(name):
    """As a GPU generates: what a step depends on is in tensors, and nobody looks at them."""
    model = model_of(small(name, num_decoder_layers=3))
    ids = random_ids(2, 12)
    source = (random_ids(2, 5),) if model.config.shape == "encoder-decoder" else ()
    expected = model(*source, ids)
    counter = CompileCounterWithBackend(BACKEND)
    run = compile_blocks(counter)

    def one_token(block, x, *inputs):
        mark_lengths(*inputs)
        return run(block, x, *inputs)

    for capacity in (12, 20, 33):
        cache = model.make_cache(2, capacity)
        with torch.inference_mode(), trusting():
            parts = [model(*source, ids[:, :4], cache=cache)]
            model.decoder.one_token = one_token
            later = (None,) if source else ()
            parts += [model(*later, ids[:, place : place + 1], cache=cache) for place in range(4, 12)]
            model.decoder.one_token = None
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 1
