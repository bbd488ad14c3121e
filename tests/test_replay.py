"""When a recorded step may stand for a later one. That it gives the same tokens, tests/test_search.py shows on GPUs."""

from __future__ import annotations

import torch

import sublayer
from sublayer import lora
from sublayer.core.kernels import fused
from sublayer.generation.replay import Recorder, likeness
from support import model_of, random_ids, small


def test_likeness_outlasts_calls_and_new_values():
    model = model_of(small("llama-7b"))
    before = likeness(model)
    sublayer.generate(model, random_ids(2, 5), max_new_tokens=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert before is not None and likeness(model) == before


def test_likeness_ends_with_the_model_as_it_was():
    def other_memory(model):
        model.to(torch.bfloat16)

    def other_layer(model):
        block = model.decoder.blocks[1]
        block.feed_forward.sublayer.up = type(block.feed_forward.sublayer.up)(32, 48, bias=False)

    def other_kernel(model):
        model.decoder.blocks[0].attention.sublayer.kernel = lambda *inputs, **options: fused(*inputs, **options)

    def other_forward(model):
        block = model.decoder.blocks[0]
        plain = block.forward
        block.forward = lambda *inputs: plain(*inputs)

    for change in (other_memory, other_layer, other_kernel, other_forward):
        model = model_of(small("llama-7b"))
        before = likeness(model)
        change(model)
        assert likeness(model) not in (before, None), change.__name__


def test_no_likeness_of_what_may_change_unseen():
    model = model_of(small("llama-7b"))
    hook = model.decoder.register_forward_hook(lambda *inputs: None)
    assert likeness(model) is None
    hook.remove()
    assert likeness(model) is not None
    lora.add(model, rank=2)
    assert likeness(model) is None


def test_a_cpu_runs_every_step():
    recorder, calls = Recorder(), []
    for number in range(4):
        out = recorder("key", lambda x: calls.append(x) or x + 1, torch.tensor([number], device="cpu"))
        assert out.tolist() == [number + 1]
    assert len(calls) == 4
