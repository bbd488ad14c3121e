"""Training against torch: the loss, one step, batches in every layout, and what happens when a step goes wrong."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from tests.support import VOCAB, model_of, seeded, small
from tests.support_training import apart, losses, metrics, recipe_of, run_of, same, trainer_of, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sublayer
from sublayer.data import Tokenizer, objectives
from sublayer.data.batches import Batch, collate
from sublayer.data.items import lay
from sublayer.data.objectives import IGNORE, Example
from sublayer.data.settings import OBJECTIVES, DataSettings
from sublayer.hub import load_model
from sublayer.train import _packed, train
from sublayer.training.checkpoint import checkpoints
from sublayer.training.loss import correct, linear_cross_entropy
from sublayer.training.recipe import Recipe
from sublayer.training.step import BatchLoss
from sublayer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("own_cache")


# The loss over a large vocabulary


def parts_of(rows: int, width: int, classes: int, bias: bool, seed: int) -> tuple[list[Tensor | None], Tensor]:
    generator = seeded(seed)
    shapes: list[tuple[int, ...] | None] = [(rows, width), (classes, width), (classes,) if bias else None]
    tensors = [None if s is None else torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    return tensors, torch.randint(classes, (rows,), generator=generator)


def gradients(loss: Tensor, parts: list[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [part for part in parts if part is not None]))


@given(
    rows=st.integers(1, 40), width=st.integers(1, 12), classes=st.integers(1, 50), chunk=st.integers(1, 50),
    bias=st.booleans(), smoothing=st.sampled_from([0.0, 0.1, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear_cross_entropy_is_torchs(
    rows: int, width: int, classes: int, chunk: int, bias: bool, smoothing: float, seed: int
) -> None:
    parts, labels = parts_of(rows, width, classes, bias, seed)
    scale = 0.37  # the loss of a step is divided, so the incoming gradient is not 1
    ours = linear_cross_entropy(*parts, labels, smoothing=smoothing, chunk=chunk)  # type: ignore[arg-type]
    exact = [None if part is None else part.detach().double().requires_grad_() for part in parts]
    logits = F.linear(*exact)  # type: ignore[arg-type]
    theirs = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    for one, other in zip(gradients(ours * scale, parts), gradients(theirs * scale, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert int(correct(*parts, labels, chunk)) == int(logits.argmax(-1).eq(labels).sum())  # type: ignore[arg-type]


def test_linear_cross_entropy_survives_large_logits() -> None:
    features, weight = torch.full((3, 1), 200.0), torch.tensor([[1.0], [-1.0], [0.999]])
    labels = torch.tensor([0, 1, 2])
    expected = F.cross_entropy(F.linear(features.double(), weight.double()), labels, reduction="sum")
    torch.testing.assert_close(
        linear_cross_entropy(features, weight, None, labels).double(), expected, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_linear_cross_entropy_in_bfloat16_is_close(smoothing: float) -> None:
    parts, labels = parts_of(30, 16, 40, True, 0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(*parts, labels, smoothing=smoothing, chunk=7)  # type: ignore[arg-type]
    theirs = F.cross_entropy(F.linear(*parts), labels, reduction="sum", label_smoothing=smoothing)  # type: ignore[arg-type]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)
    for one, other in zip(gradients(ours, parts), gradients(theirs, parts), strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.02


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_a_chunk_of_logits_is_ever_made(dtype: torch.dtype) -> None:
    rows, width, classes, chunk = 300, 8, 100, 30
    parts, labels = parts_of(rows, width, classes, True, 0)
    with Largest() as largest, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        linear_cross_entropy(*parts, labels, smoothing=0.1, chunk=chunk).backward()  # type: ignore[arg-type]
    assert largest.numel == chunk * classes  # and the whole would be ten times that


# Every objective, from files to a model that knows them by heart

BY_HEART: dict[str, dict[str, Any]] = {
    "masked": {"train_lr": 5e-3},
    "span-corruption": {
        "tokenizer_kind": "bpe", "tokenizer_unk": "", "model_d_model": 64, "model_head_dim": 16, "train_steps": 200,
    },
    "causal": {"train_lr": 5e-3, "train_steps": 250},
    "denoising": {"train_lr": 5e-3},
    "prompt-completion": {"train_lr": 5e-3, "train_steps": 250},
    "classify-image": {"train_batch_tokens": 16},
}  # fmt: skip


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "chat"])  # it needs a chat template
def test_every_objective_learns_a_small_set_by_heart(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import support_training

    counted = [{"text": "one two three four five six seven eight nine ten"}] * 8
    if objective in ("masked", "span-corruption"):  # other tokens are hidden in each epoch: all must be known
        monkeypatch.setitem(support_training.ROWS, objective, counted)
    changes = {"train_steps": 150, "train_batch_tokens": 200, "train_log_every": 10} | BY_HEART.get(objective, {})
    trainer = trainer_of(recipe_of(tmp_path, objective, **changes), tmp_path / "run")
    trainer.run()
    curve = losses(tmp_path / "run")
    assert curve[0] > 0.3
    # A row may begin within a document, where little is told of what comes next.
    assert curve[-1] < (0.1 if objective == "causal" else 0.05)


# Batches in every layout

LENGTHS = (5, 11, 2, 7)


def examples_of(family: str, seed: int = 0) -> list[Example]:
    random = np.random.default_rng(seed)
    out = []
    for length in LENGTHS:
        ids, other = (random.integers(3, VOCAB, size) for size in (length + 1, 13 - length))
        if sublayer.preset(family).shape == "encoder-decoder":
            out.append(objectives.sequence_to_sequence(ids, other, start=0, eos=1, max_length=20))
        elif sublayer.preset(family).shape == "decoder":
            out.append(objectives.causal(ids))
        else:
            special = np.arange(VOCAB) < 3
            out.append(objectives.masked(ids, random, mask_id=2, vocab_size=VOCAB, special=special, probability=0.4))
    return out


def loss_of(model: Any, batches: list[Batch], smoothing: float = 0.1) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = sum((BatchLoss(model, smoothing)(batch)[0] for batch in batches), torch.zeros(()))
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def reference(model: Any, examples: list[Example], smoothing: float = 0.1) -> tuple[float, dict[str, Tensor]]:
    """Each example alone, through all logits and torch's own loss."""
    model.zero_grad()
    loss = torch.zeros(())
    for example in examples:
        inputs = [torch.from_numpy(example[name])[None] for name in ("ids", "source", "target") if name in example]
        labels = torch.from_numpy(example["labels"])
        loss = loss + F.cross_entropy(
            model(*inputs)[0], labels, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE
        )
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "family", ["gpt2", "llama-7b", "mistral-7b", "bert-base", "original-base", "t5-base", "bart-base"]
)
def test_bucketed_padded_and_packed_batches_are_the_same_examples(family: str) -> None:
    head = {"head": "mlm", "pooler": "none"} if family == "bert-base" else {}
    model, examples = model_of(small(family, **head)), examples_of(family)
    expected, expected_grads = reference(model, examples)
    for batches in (
        [collate(lay(examples), packed=False)],
        [collate(lay(examples), packed=True)],
        [collate(lay(examples), packed=True, bound=30)],
        [collate(lay(examples), rows=dict.fromkeys([name for name in examples[0] if name != "labels"], 16), count=5)],
        [collate(lay(examples[:2]), packed=False), collate(lay(examples[2:]), packed=True)],
        [collate(lay([example]), packed=False) for example in examples],
    ):
        assert sum(batch.targets for batch in batches) == sum((one["labels"] != IGNORE).sum() for one in examples)
        loss, grads = loss_of(model, batches)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert apart(grads, expected_grads) < 1e-4


@pytest.mark.parametrize(
    ("device", "dropped", "length", "layout", "packed"),
    [
        ("cuda", 0.0, 2048, "auto", True),
        ("cuda", 0.1, 512, "auto", True),
        ("cuda", 0.1, 513, "auto", False),  # no kernel drops weights of long packed sequences
        ("cuda", 0.1, 513, "packed", True),
        ("cpu", 0.0, 64, "auto", False),
    ],
)
def test_auto_packs_where_a_kernel_does_it_whole(
    device: str, dropped: float, length: int, layout: str, packed: bool
) -> None:
    data = DataSettings(objective="chat", max_length=length, layout=layout)
    model = model_of(small("gpt2", attention_dropout=dropped))
    assert _packed(Recipe(data=data), model, torch.device(device)) is packed


def test_a_label_of_a_sequence_is_the_same_in_every_layout() -> None:
    config = small("bert-base", head="classifier", num_labels=4)
    model, random = model_of(config), np.random.default_rng(0)
    ids = [random.integers(3, VOCAB, length) for length in LENGTHS]
    examples = [objectives.label_sequence(one, n, num_labels=4, max_length=20) for n, one in enumerate(ids)]
    logits = torch.cat([model(torch.from_numpy(one)[None]) for one in ids])
    expected = F.cross_entropy(logits, torch.arange(4), reduction="sum").item()
    for packed in (False, True):
        assert loss_of(model, [collate(lay(examples), packed=packed)], 0.0)[0] == pytest.approx(expected, rel=1e-5)


def test_a_row_of_two_documents_is_each_of_them_alone(tmp_path: Path) -> None:
    run = run_of(recipe_of(tmp_path, "causal", data_max_length=40), tmp_path / "run")
    model, items = run.model.eval(), run.loader.items
    mixed = [pieces for n in range(len(items)) if len(pieces := items.examples(n, None, 0)) > 1]
    assert mixed
    for pieces in mixed:
        together = loss_of(model, [collate(lay(pieces), packed=True)], 0.0)[0]
        assert together == pytest.approx(reference(model, pieces, 0.0)[0], rel=1e-5)


# One step against torch


def first_gradients(trainer: Trainer) -> tuple[dict[str, Tensor], int]:
    trainer._update = lambda: (torch.zeros(()), torch.zeros((), dtype=torch.bool))  # type: ignore[method-assign]
    step = next(trainer.loader.steps())
    trainer.learn(step)
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}, len(step.batches)


def test_accumulated_batches_give_the_gradient_of_the_whole(tmp_path: Path) -> None:
    whole: dict[str, Tensor] = {}
    counts = set()
    for micro in (None, 210, 110, 55):
        recipe = recipe_of(tmp_path, train_batch_tokens=400, train_micro_tokens=micro, data_group_by_length=False)
        found, count = first_gradients(trainer_of(recipe, tmp_path / "run"))
        whole = whole or found
        counts.add(count)
        assert apart(found, whole) < 1e-6
    assert {1, 2, 4} < counts and max(counts) >= 8


def test_training_steps_are_those_of_a_plain_torch_loop(tmp_path: Path) -> None:
    """Label smoothing, the mean over tokens, clipping, AdamW with its groups, and the average of the weights."""
    changes: dict[str, Any] = dict(train_warmup=0, train_clip=0.5, train_label_smoothing=0.1, train_weight_decay=0.1)
    changes |= dict(train_eps=1e-4, train_betas=[0.8, 0.9], train_ema=0.9)  # eps: noise must not become a step
    run = run_of(recipe_of(tmp_path, **changes), tmp_path / "run")
    model: Any = copy.deepcopy(run.model)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), eps=1e-4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the first call copies
    for _, step in zip(range(6), run.loader.steps(), strict=False):
        (batch,) = step.batches
        logits = model(batch.inputs["source"], batch.inputs["target"], source_mask=batch.masks["source"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        average.update_parameters(model)
    assert norm > 0.5  # else clipping was not tried

    trainer = trainer_of(run.recipe, tmp_path / "run")
    trainer.run()
    last = metrics(tmp_path / "run")[-1]
    assert last["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert last["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert apart(weights(trainer), model.state_dict()) < 1e-5
    with trainer.averaged():
        assert apart(weights(trainer), average.module.state_dict()) < 1e-5
    assert apart(weights(trainer), model.state_dict()) < 1e-5


def test_the_model_of_a_run_is_the_mean_of_its_last_checkpoints(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train_average=3, train_keep=3, train_save_every=2)
    train(recipe, tmp_path / "run", quiet=True)
    kept = checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in kept] == ["step-00000002", "step-00000004", "step-00000006"]
    states = [load_model(path).state_dict() for path in kept]
    final = load_model(tmp_path / "run" / "model").state_dict()
    for name in final:
        torch.testing.assert_close(final[name], torch.stack([state[name] for state in states]).mean(0))
    assert apart(states[0], states[-1]) > 1e-4


@pytest.mark.parametrize("objective", ["sequence-to-sequence", "causal", "masked", "classify-image"])
def test_recomputed_activations_give_the_same_gradients(objective: str, tmp_path: Path) -> None:
    found = [
        first_gradients(trainer_of(recipe_of(tmp_path, objective, train_recompute=again, model_dropout=0.2), tmp_path))[
            0
        ]
        for again in (False, True)
    ]
    assert found[0] and same(*found)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    curves = []
    for dtype in ("float32", "bfloat16"):
        trainer = trainer_of(recipe_of(tmp_path, train_dtype=dtype, train_steps=40), tmp_path / dtype)
        trainer.run()
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        curves.append(losses(tmp_path / dtype))
    assert curves[1] != curves[0]
    assert curves[1][0] == pytest.approx(curves[0][0], rel=0.02)
    assert sum(curves[1][-5:]) == pytest.approx(sum(curves[0][-5:]), rel=0.3)


# When something goes wrong


def break_steps(trainer: Trainer, when: set[int], factor: float) -> None:
    """Multiply the gradients of some steps (1 is the first)."""
    update = trainer._update

    def wrong() -> tuple[Tensor, Tensor]:
        if trainer.state.step + 1 in when:
            for parameter in trainer.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return update()

    trainer._update = wrong  # type: ignore[method-assign]


def follow(trainer: Trainer) -> list[dict[str, Tensor]]:
    """The weights after every step."""
    seen: list[dict[str, Tensor]] = [weights(trainer)]
    learn = trainer.learn

    def watched(step: Any) -> None:
        learn(step)
        seen.append(weights(trainer))

    trainer.learn = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize(("factor", "spike"), [(float("nan"), 0.0), (float("inf"), 0.0), (100.0, 8.0)])
def test_a_bad_step_changes_nothing_and_the_run_goes_on(
    optimizer: str, factor: float, spike: float, tmp_path: Path
) -> None:
    trainer = trainer_of(recipe_of(tmp_path, train_optimizer=optimizer, train_spike=spike), tmp_path / "run")
    break_steps(trainer, {3}, factor)
    seen = follow(trainer)
    state = trainer.run()
    assert state.step == 6 and state.skipped == 1 and state.skipped_in_a_row == 0
    assert [same(one, other) for one, other in itertools.pairwise(seen)] == [
        False, False, True, False, False, False,
    ]  # fmt: skip
    assert len(trainer.state.notes) == 1 and "step 3" in trainer.state.notes[0]
    assert all(bool(tensor.isfinite().all()) for tensor in weights(trainer).values())


def test_a_loss_that_is_nan_is_skipped_too(tmp_path: Path) -> None:
    trainer = trainer_of(recipe_of(tmp_path), tmp_path / "run")
    calls = iter(range(100))
    trainer.model.encoder.register_forward_hook(  # type: ignore[union-attr]
        lambda module, inputs, output: output * float("nan") if next(calls) == 2 else None
    )
    seen = follow(trainer)
    trainer.run()
    assert trainer.state.skipped == 1
    assert same(seen[2], seen[3]) and not same(seen[3], seen[4])


def test_a_skipped_step_leaves_the_optimiser_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(recipe_of(tmp_path), tmp_path / "run")
    steps = trainer.loader.steps()
    for _ in range(2):
        trainer.learn(next(steps))
        trainer.state.step += 1

    def stored() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in trainer._tensors().items() if name != "sums"}

    before = stored()
    break_steps(trainer, {3}, float("nan"))
    trainer.learn(next(steps))
    assert len(before) > 20 and same(stored(), before)


def test_nonfinite_stop_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train_nonfinite="stop", train_save_every=2)
    trainer = trainer_of(recipe, tmp_path / "run")
    break_steps(trainer, {5}, float("nan"))
    with pytest.raises(ValueError, match=r"step 5: .*train\.nonfinite.*lower train\.lr") as error:
        trainer.run()
    assert "\n" not in str(error.value)
    again = trainer_of(recipe, tmp_path / "run")
    assert again.resume() and again.state.step == 4
    assert again.run().step == 6


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(recipe_of(tmp_path, train_max_skips=3, train_steps=20), tmp_path / "run")
    break_steps(trainer, {2, 3, 5, 6, 8, 9, 10}, float("nan"))
    with pytest.raises(ValueError, match=r"step 10: .*3 steps in a row"):
        trainer.run()
    assert trainer.state.skipped == 7


# Evaluation and early stopping


def test_a_run_stops_early_and_its_model_is_the_best(tmp_path: Path) -> None:
    data = dict(data_valid=str(tmp_path / "sequence-to-sequence.jsonl"), train_eval_samples=0, train_ema=0.5)
    recipe = recipe_of(tmp_path, train_steps=50, train_eval_every=2, train_patience=3, **data)
    trainer = trainer_of(recipe, tmp_path / "run")
    values = iter([5.0, 4.0, 4.5, 3.0, 3.0, 3.5, 3.1, 1.0])
    at: dict[int, dict[str, Tensor]] = {}

    def evaluate(model: Any, step: int) -> dict[str, float]:
        at[step] = weights(trainer)
        return {"valid_loss": next(values)}

    trainer.evaluate = evaluate
    state = trainer.run()
    assert state.step == 14 and state.done and state.best == 3.0 and trainer.status == "finished"
    best = load_model(tmp_path / "run" / "best").state_dict()
    assert same(best, at[8]) and not same(at[8], weights(trainer))
    again = trainer_of(recipe, tmp_path / "run")
    assert again.resume() and again.run().step == 14


def test_the_validation_loss_is_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Of ragged batches, without smoothing and without dropout, whatever the run trains with."""
    recipe = recipe_of(tmp_path, data_valid=str(tmp_path / "sequence-to-sequence.jsonl"), train_label_smoothing=0.1,
                       model_dropout=0.3, train_eval_samples=0, train_batch_tokens=60)  # fmt: skip
    trainer = trainer_of(recipe, tmp_path / "run")
    trainer.run()
    model, items = trainer.model.eval(), trainer.loader.items
    examples = [items.examples(n, None, 0)[0] for n in range(len(items))]
    expected = reference(model, examples, 0.0)[0] / sum(len(one["labels"]) for one in examples)
    last = metrics(tmp_path / "run")[-1]
    assert last["valid_loss"] == pytest.approx(expected, rel=1e-5)
    assert last["valid_perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)


# What comes out


def test_transformers_opens_a_trained_translator(tmp_path: Path) -> None:
    from sublayer.training.recipe import find_recipe, load_recipe

    small_model = [f"model.{key}={value}" for key, value in dict(d_model=32, d_ff=64, num_heads=4).items()]
    small_model += ["model.num_encoder_layers=1", "model.num_decoder_layers=1"]
    data = str(recipe_of(tmp_path).data.train)
    changes = [*small_model, f"data.train={data}", "tokenizer.vocab_size=300", "train.steps=5", "train.device=cpu"]
    train(load_recipe(find_recipe("translate"), [*changes, "train.keep_memory=false"]), tmp_path / "run", quiet=True)
    folder = tmp_path / "run" / "model"
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    ours = load_model(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source = tokenizer("the red house", return_tensors="pt").input_ids
    assert source[0].tolist() == Tokenizer.load(folder).encode("the red house")
    assert source[0, -1] == tokenizer.eos_token_id == theirs.config.eos_token_id
    target = torch.tensor([[theirs.config.decoder_start_token_id, 20, 30, 40]])
    with torch.no_grad():
        torch.testing.assert_close(
            ours(source, target), theirs(source, decoder_input_ids=target).logits, rtol=1e-4, atol=1e-4
        )
