"""The optimisers against torch's own, the schedules against transformers' and the paper's formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.support import example, random_ids, small
from torch import Tensor, nn

import sublayer
from sublayer.training.optimizer import (
    OPTIMIZERS,
    load_state_tensors,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from sublayer.training.schedule import SCHEDULES, learning_rate


@pytest.fixture(autouse=True)
def on_the_processor() -> Iterator[None]:
    """Optimisers promise bitwise resumption where the sums have one order."""
    with torch.device("cpu"):
        yield


def model_of(name: str = "gpt2", seed: int = 0) -> nn.Module:
    return sublayer.build(small(name), seed=seed)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Real steps: the loss of next tokens, and a learning rate that changes."""
    for step in steps:
        ids = random_ids(2, 9, seed=step)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, 1e-2 / step)
        optimizer.step()


def matrix_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if ".blocks." in name and p.dim() == 2}


def members(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}


# Optimisers


def reference(name: str, model: nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    """Torch's own optimisers, unfused, with the groups written out by hand."""
    inner = matrix_names(model) if name == "muon" else set()
    rest = [(key, p) for key, p in model.named_parameters() if key not in inner]
    groups = [
        {"params": [p for _, p in rest if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for _, p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=1e-2)]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.97), eps=1e-2, fused=False, foreach=False)
    if name == "adamw":
        return [adam]
    weights = [p for key, p in model.named_parameters() if key in inner]
    muon = torch.optim.Muon(
        weights, lr=1e-2, weight_decay=decay, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    return [adam, muon]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_like_torch(name: str) -> None:
    ours, theirs = model_of(), model_of()
    optimizer = make_optimizer(ours, name, lr=1e-2, betas=(0.8, 0.97), eps=1e-2, weight_decay=0.1, momentum=0.9)
    others = reference(name, theirs, 0.1)
    before = [p.detach().clone() for p in ours.parameters()]
    for seed in range(4):
        for model in (ours, theirs):
            give_gradients(model, seed)
        optimizer.step()
        for other in others:
            other.step()
    for start, mine, other in zip(before, ours.parameters(), theirs.parameters(), strict=True):
        assert not torch.equal(start, mine)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "t5-base", "bert-base", "vit-b-16", "llama-7b"])
def test_groups_hold_every_parameter_once(name: str) -> None:
    model = model_of(name)
    shapes = {key: p.dim() for key, p in model.named_parameters()}
    for optimizer_name in OPTIMIZERS:
        optimizer = make_optimizer(model, optimizer_name, lr=1e-3, weight_decay=0.1)
        groups = members(model, optimizer)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(shapes)
        assert set.union(*groups.values()) == set(shapes)
        assert groups["plain"] == {key for key in shapes if shapes[key] < 2}
        assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups}["plain"] == 0.0
    assert groups["matrices"] == matrix_names(model)
    assert not any("embeddings" in key or "head" in key or "norm" in key for key in groups["matrices"])


def test_frozen_parameters_are_left_out() -> None:
    model = model_of()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1" in key)
    for name in OPTIMIZERS:
        optimizer = make_optimizer(model, name, lr=1e-3)
        assert set.union(*members(model, optimizer).values()) == {
            key for key, _ in model.named_parameters() if "blocks.1" in key
        }
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        make_optimizer(model, lr=1e-3)


def test_learning_rate_of_each_group() -> None:
    optimizer = make_optimizer(model_of(), "muon", lr=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5]
    optimizer.param_groups[0]["lr_scale"] = 3.0
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 0.25, 0.25]


def test_learning_rate_of_muon_reaches_its_parts() -> None:
    model = model_of()
    optimizer = make_optimizer(model, "muon", lr=1.0, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    give_gradients(model, 0)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_closure_is_called_once() -> None:
    model, calls = model_of(), []
    optimizer = make_optimizer(model, "muon", lr=1e-3)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        give_gradients(model, 0)
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7.0 and calls == [True]


# State


def by_tensors(old: Any, model: nn.Module, new: Any, other: nn.Module, folder: Path) -> None:
    safetensors.torch.save_file(state_tensors(old, model), folder / "optimizer.safetensors")
    load_state_tensors(new, other, safetensors.torch.load_file(folder / "optimizer.safetensors"))


def by_dictionary(old: Any, model: nn.Module, new: Any, other: nn.Module, folder: Path) -> None:
    new.load_state_dict(old.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("carry", [by_tensors, by_dictionary])
@pytest.mark.parametrize("stop", [0, 3])
def test_resumed_training_is_bitwise_the_same(name: str, carry: Callable[..., None], stop: int, tmp_path: Path) -> None:
    straight = model_of()
    train(straight, make_optimizer(straight, name, lr=1.0, weight_decay=0.1), range(1, 7))

    first = model_of()
    optimizer = make_optimizer(first, name, lr=1.0, weight_decay=0.1)
    train(first, optimizer, range(1, 1 + stop))
    second = model_of(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = make_optimizer(second, name, lr=1.0, weight_decay=0.1)
    carry(optimizer, first, resumed, second, tmp_path)
    train(second, resumed, range(1 + stop, 7))
    for (key, expected), got in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, got), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_has_the_same_tensors_before_and_after_a_step(name: str) -> None:
    model = model_of("vit-b-16")  # it has a weight of four dimensions
    optimizer = make_optimizer(model, name, lr=1e-3)

    def kinds() -> dict[str, tuple[Any, ...]]:
        tensors = state_tensors(optimizer, model)
        return {key: (tuple(t.shape), t.dtype, t.device.type) for key, t in tensors.items()}

    before = kinds()
    give_gradients(model, 0)
    optimizer.step()
    assert before == kinds()
    assert {key.split("/", 1)[1] for key in before} == {key for key, _ in model.named_parameters()}


def test_state_of_an_unused_parameter_does_not_matter() -> None:
    """A parameter without gradient has no state in torch, and must not stop a run from being resumed."""
    model = model_of("bert-base")
    optimizer = make_optimizer(model, lr=1e-3)
    give_gradients(model, 0)
    for parameter in model.head.parameters():
        parameter.grad = None
    optimizer.step()
    tensors = state_tensors(optimizer, model)
    assert tensors["step/head.pooler.dense.weight"] == 0 and tensors["step/encoder.embeddings.norm.weight"] == 1
    other = model_of("bert-base")
    load_state_tensors(make_optimizer(other, lr=1e-3), other, tensors)


def test_loaded_state_shares_no_memory_with_what_was_given() -> None:
    model = model_of()
    optimizer = make_optimizer(model, lr=1e-3)
    tensors = {key: tensor.clone() for key, tensor in state_tensors(optimizer, model).items()}
    load_state_tensors(optimizer, model, tensors)
    give_gradients(model, 0)
    optimizer.step()
    assert not any(tensor.any() for tensor in tensors.values())


def test_state_that_does_not_fit_is_refused_in_one_line() -> None:
    model = model_of()
    optimizer = make_optimizer(model, lr=1e-3)
    give_gradients(model, 0)
    optimizer.step()
    tensors = {key: tensor.clone() for key, tensor in state_tensors(optimizer, model).items()}
    key = "exp_avg/decoder.final_norm.weight"
    for wrong, message in (
        ({k: t for k, t in tensors.items() if k != key}, r"lacks 'exp_avg/decoder\.final_norm\.weight'"),
        (tensors | {key: torch.zeros(3)}, r"is float32 \[3\], and this model needs float32 \[32\]"),
        (tensors | {key: tensors[key].double()}, r"is float64 \[32\], and this model needs float32 \[32\]"),
        (tensors | {"exp_avg/stranger": torch.zeros(1)}, "holds 'exp_avg/stranger'"),
        ({}, "lacks 'step/"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_state_tensors(optimizer, model, wrong)
        assert "\n" not in str(caught.value)
        now = state_tensors(optimizer, model)
        assert all(torch.equal(now[k], tensors[k]) for k in tensors)  # a refusal changes nothing
    with pytest.raises(ValueError, match="lacks 'momentum_buffer/"):
        load_state_tensors(make_optimizer(model, "muon", lr=1e-3), model, tensors)


def test_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        make_optimizer(model_of(), "adamv", lr=1e-3)


def test_bfloat16_model_steps() -> None:
    config = dataclasses.replace(small("gpt2"), num_decoder_layers=1)
    for name in OPTIMIZERS:
        model = sublayer.build(config, dtype="bfloat16", seed=0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = make_optimizer(model, name, lr=1e-1)
        model(*example(config)).float().square().mean().backward()
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.isfinite().all() for p in model.parameters())


# Schedules


def their_rates(make: Callable[[torch.optim.Optimizer], Any], peak: float, steps: int) -> list[float]:
    """What a scheduler of transformers gives after each of its first `steps` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler, out = make(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        out.append(scheduler.get_last_lr()[0])
    return out


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_against_transformers(schedule: str, warmup: int) -> None:
    peak, steps, decay, beyond = 3e-4, 40, 11, 45
    if schedule == "inverse-sqrt":
        warmup = warmup or 2  # without warm-up transformers invents a time scale, and ours asks for one
    makers: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "constant": lambda o: transformers.get_constant_schedule_with_warmup(o, warmup),
        "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, warmup, steps),
        "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, warmup, steps),
        "inverse-sqrt": lambda o: transformers.get_inverse_sqrt_schedule(o, warmup),
        "wsd": lambda o: transformers.get_wsd_schedule(o, warmup, decay, steps, decay_type="linear"),
    }
    # Their cosine turns and rises again after the last step; ours stays at the end.
    steps_compared = steps if schedule == "cosine" else beyond
    theirs = their_rates(makers[schedule], peak, steps_compared)
    ours = [
        learning_rate(step, schedule=schedule, peak=peak, steps=steps, warmup=warmup, decay=decay)
        for step in range(1, steps_compared + 1)
    ]
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_schedule_with_a_final_rate_against_transformers() -> None:
    peak, steps, warmup = 1e-3, 30, 5
    cosine = their_rates(
        lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, warmup, steps, min_lr_rate=0.1),
        peak,
        steps,
    )
    wsd = their_rates(
        lambda o: transformers.get_wsd_schedule(o, warmup, 9, steps, decay_type="linear", min_lr_ratio=0.1),
        peak,
        steps,
    )
    for schedule, theirs in (("cosine", cosine), ("wsd", wsd)):
        ours = [
            learning_rate(step, schedule=schedule, peak=peak, steps=steps, warmup=warmup, final=0.1, decay=9)
            for step in range(1, steps + 1)
        ]
        assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
        assert ours[-1] == pytest.approx(0.1 * peak)


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 4000), (32, 3)])
def test_schedule_of_the_paper(d_model: int, warmup: int) -> None:
    for step in (1, 2, warmup - 1, warmup, warmup + 1, 10 * warmup):
        expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        rate = learning_rate(step, schedule="inverse-sqrt", peak=None, steps=100, warmup=warmup, d_model=d_model)
        assert rate == pytest.approx(expected, rel=1e-12)


def test_linear_schedule_ends_at_the_final_rate() -> None:
    rates = [learning_rate(step, schedule="linear", peak=2.0, steps=10, final=0.25) for step in (5, 10, 11)]
    assert rates == pytest.approx([1.25, 0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": "linear", "peak": None}, "no peak"),
        ({"schedule": "inverse-sqrt", "peak": None, "warmup": 10}, "no peak"),
        ({"schedule": "inverse-sqrt"}, "at least 1"),
        ({"schedule": "wsd", "warmup": 60, "decay": 50}, "fit in the steps"),
        ({"schedule": "linear", "final": 1.5}, "from 0 to 1"),
        ({"schedule": "linear", "step": 0}, "count from 1"),
    ],
)
def test_wrong_schedule_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"step": 70, "peak": 1.0, "steps": 100} | changes
    with pytest.raises(ValueError, match=message) as caught:
        learning_rate(settings.pop("step"), **settings)
    assert "\n" not in str(caught.value)
