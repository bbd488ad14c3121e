"""What must hold for every Transformer that can be configured, tried on random ones of all families."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load, save
from tests.support import (
    CAUSAL_FAMILIES,
    FAMILIES,
    VOCAB,
    configs,
    example,
    model_of,
    random_ids,
    small,
)

import sublayer
from sublayer import ModelConfig, Packing

close = dict(rtol=1e-4, atol=2e-5)
decoders = tuple(name for name in CAUSAL_FAMILIES if sublayer.preset(name).shape == "decoder")
both = tuple(name for name in CAUSAL_FAMILIES if sublayer.preset(name).shape == "encoder-decoder")


def run(model, ids, **masks):
    """The model on `ids`, as source and target alike where it takes two."""
    if model.config.shape != "encoder-decoder":
        return model(ids, **masks)
    masks = {f"{side}_{key}": value for key, value in masks.items() for side in ("source", "target")}
    return model(ids, ids, **masks)


@given(configs(families=CAUSAL_FAMILIES), st.integers(0, 5))
def test_a_later_token_never_changes_an_earlier_output(config, place):
    model = model_of(config)
    ids = random_ids(2, 7)
    changed = ids.clone()
    changed[:, place + 1 :] = random_ids(2, 6 - place, seed=9)
    source = (random_ids(2, 5),) if config.shape == "encoder-decoder" else ()
    before, after = model(*source, ids), model(*source, changed)
    if config.rotary_scaling is None or config.rotary_scaling.kind != "dynamic":
        torch.testing.assert_close(after[:, : place + 1], before[:, : place + 1], **close)
    assert not torch.equal(after[:, -1], before[:, -1])


@given(configs(), st.integers(1, 4), st.sampled_from(["left", "right"]))
def test_padding_changes_nothing(config, amount, side):
    model = model_of(config)
    ids, junk = random_ids(2, 6), random_ids(2, amount, seed=5)
    real, fake = torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, amount, dtype=torch.bool)
    order = (lambda a, b: (b, a)) if side == "left" else (lambda a, b: (a, b))
    mask = torch.cat(order(real, fake), 1)
    out = run(model, torch.cat(order(ids, junk), 1), mask=mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[mask].view(2, 6, -1), run(model, ids), **close)


@given(configs())
def test_the_order_and_company_of_a_batch_change_nothing(config):
    model = model_of(config)
    ids = random_ids(3, 6)
    out = run(model, ids)
    torch.testing.assert_close(run(model, ids.flip(0)).flip(0), out, **close)
    torch.testing.assert_close(run(model, ids[1:2]), out[1:2], **close)


@given(configs(families=decoders), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_cached_decoding_equals_the_full_pass(config, steps):
    """One token or several at a time, whatever the split."""
    model = model_of(config)
    ids = random_ids(2, sum(steps))
    cache = model.make_cache(2, sum(steps) + 3)
    parts = [model(part, cache=cache) for part in ids.split(steps, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), **close)
    assert cache.lengths.tolist() == [sum(steps)] * 2


@given(configs(families=both), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_cached_decoding_with_a_source_equals_the_full_pass(config, steps):
    model = model_of(config)
    source, target = random_ids(2, 6), random_ids(2, sum(steps), seed=1)
    source_mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    full = model(source, target, source_mask=source_mask)
    cache = model.make_cache(2, sum(steps))
    first, *rest = target.split(steps, 1)
    parts = [model(source, first, source_mask=source_mask, cache=cache)]
    parts += [model(None, part, cache=cache) for part in rest]
    torch.testing.assert_close(torch.cat(parts, 1), full, **close)


@given(configs(families=decoders), st.sampled_from(["left", "right"]), st.integers(1, 3), st.sampled_from([None, 6]))
def test_cached_decoding_of_ragged_rows_equals_each_row_alone(config, side, chunk, largest):
    """Rows of 6 and 3 tokens, padded on either side, then continued by chunks of a few tokens."""
    model = model_of(config)
    rows = [random_ids(1, 6, seed=1), random_ids(1, 3, seed=2)]
    new = random_ids(2, 2 * chunk, seed=3)
    ids, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(6 - tokens.size(1), None) if side == "left" else slice(tokens.size(1))
        ids[row, place], mask[row, place] = tokens[0], True
    cache = model.make_cache(2, 6 + 2 * chunk, largest)
    model(ids, mask=mask, cache=cache)
    out = torch.cat([model(part, cache=cache) for part in new.split(chunk, 1)], 1)
    for row, tokens in enumerate(rows):
        alone = model(torch.cat((tokens, new[row : row + 1]), 1))[:, tokens.size(1) :]
        torch.testing.assert_close(out[row : row + 1], alone, **close)


@given(configs(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_packed_and_padded_agree_in_outputs_and_gradients(config, lengths):
    ids = [random_ids(length, seed=n) for n, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    weight = torch.randn(sum(lengths), 1)
    results = []
    for layout in ("padded", "packed"):
        model = model_of(config).double().train(config.norm == "batchnorm")
        if layout == "padded":
            out = run(model, padded, mask=mask)[mask]
        else:
            out = run(model, torch.cat(ids), packing=Packing.from_lengths(lengths))
        (out * weight).sum().backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (out, grads), (packed_out, packed_grads) = results
    torch.testing.assert_close(packed_out, out, **close)
    assert packed_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-5, atol=1e-6)


@given(configs(families=FAMILIES))
def test_gradients_reach_every_parameter(config):
    if config.image_input:
        config = dataclasses.replace(config, embedding_scale=False, window=None, window_layers=None)
    model = sublayer.build(config, seed=0)
    inputs = example(config, batch=3, length=9)
    out = model(*inputs)
    if config.pooler != "none" and config.head == "none":
        out = out.sum(1) + model.head.pooler(out)  # a pooler that no head reads is called by hand
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        one_place = config.window == 1 or (config.positions in ("relative", "alibi") and "bias.weight" in name)
        if not one_place:
            blind = ("key.bias",)  # a constant added to all scores of a query changes no softmax
            dead = config.window is not None and ("query" in name or "key" in name)
            assert name.endswith(blind) or dead or parameter.grad.abs().sum() > 0, name


@given(configs(families=FAMILIES))
def test_save_load_gives_the_same_output(config):
    """As another process would get it: the configuration as JSON, the weights as the bytes of a safetensors file."""
    if config.image_input:
        config = dataclasses.replace(config, window=None, window_layers=None)
    model = model_of(config)
    unique = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    tensors = {name: value for name, value in model.state_dict().items() if name in unique.values()}
    stored = load(save(tensors))
    again = sublayer.build(ModelConfig.from_json(config.to_json()), seed=99).eval()
    assert again.config == config
    missing, unexpected = again.load_state_dict(stored, strict=False)
    assert not unexpected
    assert all(name not in unique.values() for name in missing)
    inputs = example(config)
    assert torch.equal(again(*inputs), model(*inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_can_be_asked_for_without_a_number(name):
    """A pass on the meta device, in training too, as tools that count operations make it."""
    config = small(name, dropout=0.1, attention_dropout=0.1)
    model, inputs = sublayer.build(config, device="meta").train(), example(config)
    assert model(*(one.to("meta") for one in inputs)).shape == model_of(config)(*inputs).shape


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_gives_the_same_weights(name):
    first, second = sublayer.build(small(name), seed=3), sublayer.build(small(name), seed=3)
    other = sublayer.build(small(name), seed=4)
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert any(
        not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True) if a.dim() > 1
    )


@given(configs(families=CAUSAL_FAMILIES))
def test_every_combination_trains_a_step_and_generates(config):
    config = dataclasses.replace(config, dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    model = sublayer.build(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = example(config)
    loss = torch.nn.functional.cross_entropy(model(*inputs).flatten(0, 1), inputs[-1].flatten())
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    new = sublayer.generate(model, inputs[0], max_new_tokens=4, eos_id=-1)
    assert new.shape == (2, 4)
    assert int(new.min()) >= 0 and int(new.max()) < VOCAB
    assert model.training
