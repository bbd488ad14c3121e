"""Fine-tuning: the objective that the columns ask for, what is learned and what is not, and runs that go on exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight
from tests.support import small
from tests.support_training import (
    COLOURS,
    LABELLED,
    PAIRS,
    QUESTIONS,
    TAGGED,
    TEXTS,
    TOKENIZERS,
    losses,
    metrics,
    write_pictures,
    write_rows,
)
from transformers import AutoTokenizer

import sublayer
from sublayer.cli import main
from sublayer.data import Tokenizer
from sublayer.data.conversations import encode_chats
from sublayer.data.readers import Row
from sublayer.data.settings import DataSettings, TokenizerSettings
from sublayer.data.sources import open_source
from sublayer.data.tokenizer_train import train_tokenizer
from sublayer.finetune import Choices, plan
from sublayer.hub.heads import config_with_head, rebuilt
from sublayer.training.optimizer import make_optimizer
from sublayer.training.recipe import load_recipe
from sublayer.training.select import freeze, learning_rate_factors
from sublayer.training.step import BatchLoss
from sublayer.training.trainer import Trainer
from test_chat import CHATML

pytestmark = pytest.mark.usefixtures("own_cache")
transformers.logging.set_verbosity_error()
CHATS = [
    {"messages": [{"role": "user", "content": f"a {a} thing"}, {"role": "assistant", "content": a[::-1]}]}
    for a in COLOURS
]


def as_sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names.get(one["role"], one["role"]), "value": one["content"]} for one in messages]


SHAREGPT = [{"conversations": as_sharegpt(row["messages"])} for row in CHATS]
PROMPTS = [{"prompt": pair["source"], "completion": " " + pair["target"]} for pair in PAIRS]
ALPACA = [
    {"instruction": f"Say {a} backwards.", "input": "" if n % 2 else f"It is {a}.", "output": a[::-1]}
    for n, a in enumerate(COLOURS)
]


def asked(row: dict[str, Any]) -> str:
    """By hand: the instruction, and below it the input, if there is one."""
    return row["instruction"] + (f"\n\n{row['input']}" if (row["input"] or "").strip() else "")


PLAIN = [{"text": text} for text in TEXTS]
# Of each kind of model: its preset, and what its tokenizer is like.
KINDS = {
    "encoder": ("bert-base", "masked"),
    "decoder": ("llama-7b", "causal"),
    "gpt2": ("gpt2", "causal"),
    "t5": ("t5-small", "span-corruption"),
    "bart": ("bart-base", "denoising"),
    "vit": ("vit-b-16", None),
}


def folder_of(kind: str, folder: Path, **changes: Any) -> Path:
    """A random model with a tokenizer of its own, as somebody might have left it."""
    name, objective = KINDS[kind]
    if objective is None:
        sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1}
        sublayer.save_model(sublayer.build(small(name, **(sizes | changes)), seed=1), folder)
        return folder
    usual = {"vocab_size": 320, "extra": ("<|im_start|>", "<|im_end|>")}
    settings = TokenizerSettings(**(usual | TOKENIZERS[objective]))
    rows = [*PLAIN, *LABELLED, *PAIRS, *QUESTIONS, *CHATS]
    texts = [str(value) for row in rows for value in row.values()]
    tokenizer = train_tokenizer(
        texts, kind=settings.kind, vocab_size=settings.vocab_size, special=settings.special,
        template=settings.template, lowercase=settings.lowercase, digits=settings.digits, extra=settings.all_extra,
    )  # fmt: skip
    if kind == "decoder":
        tokenizer.settings |= {"chat_template": CHATML}
    ids = {f"{role}_id": tokenizer.special(role) for role in ("pad", "bos", "eos")}
    size = max(tokenizer.backend.get_vocab().values()) + 1
    more = {"start_id": tokenizer.special(settings.start)} if kind in ("t5", "bart") else {}
    config = small(name, **(dict(vocab_size=size, max_positions=96, **ids, **more) | changes))
    model = sublayer.build(config, seed=1)
    with torch.no_grad():  # tokens as far apart as training leaves them, or nothing beside them could be learned
        for name, table in model.named_parameters():
            if "tokens" in name or "logits.weight" in name:
                table.mul_(0.4 / table.std())
    sublayer.save_model(model, folder)
    tokenizer.save(folder)
    return folder


def finetune(model: Path, data: Path, out: Path, *more: str) -> int:
    usual = ["train.batch_tokens=200", "train.log_every=1", "train.keep_memory=false"]
    usual += [] if any(word.startswith("train.epochs") for word in more) else ["train.steps=6"]
    return main(["finetune", str(model), "--data", str(data), "--out", str(out), "--quiet", *usual, *more])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command leaves when it refuses."""
    assert main(["finetune", *words]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sublayer: ")]
    assert len(lines) == 1
    return lines[0]


# What the columns ask for

CASES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "labels": ("encoder", LABELLED, "classify-sequence"),
    "tags": ("encoder", TAGGED, "classify-tokens"),
    "questions": ("encoder", QUESTIONS, "find-span"),
    "text to an encoder": ("encoder", PLAIN, "masked"),
    "chats": ("decoder", CHATS, "chat"),
    "chats of ShareGPT": ("decoder", SHAREGPT, "chat"),
    "prompts": ("decoder", PROMPTS, "prompt-completion"),
    "instructions": ("decoder", ALPACA, "prompt-completion"),
    "instructions to a decoder without a template": ("gpt2", ALPACA, "prompt-completion"),
    "text to a decoder": ("gpt2", PLAIN, "causal"),
    "labels to a decoder": ("gpt2", LABELLED, "prompt-completion"),
    "pairs": ("t5", PAIRS, "sequence-to-sequence"),
    "prompts to an encoder-decoder": ("bart", PROMPTS, "sequence-to-sequence"),
    "instructions to an encoder-decoder": ("t5", ALPACA, "sequence-to-sequence"),
    "text to T5": ("t5", PLAIN, "span-corruption"),
    "text to BART": ("bart", PLAIN, "denoising"),
}


@pytest.mark.parametrize("method", ["--full", "--lora=4"])
@pytest.mark.parametrize("case", [*CASES, "pictures"])
def test_every_objective_is_picked_from_columns_and_learned(case: str, method: str, tmp_path: Path) -> None:
    if case == "pictures":
        kind, objective, data = "vit", "classify-image", write_pictures(tmp_path / "pictures")
    else:
        kind, rows, objective = CASES[case]
        data = write_rows(tmp_path / "data.jsonl", rows)
    model = folder_of(kind, tmp_path / "base")
    rate = "train.lr=1e-2" if method == "--full" else "train.lr=2e-2"
    more = ["train.batch_tokens=4"] if kind == "vit" else []
    assert finetune(model, data, tmp_path / "run", method, "train.steps=40", rate, "train.warmup=2", *more) == 0
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.data.objective == objective
    curve = losses(tmp_path / "run")
    assert sum(curve[-5:]) < 0.97 * sum(curve[:5])
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["method"] == ("full" if method == "--full" else "lora") and facts["steps"] == 40
    assert (facts["share"] == 1.0) == (method == "--full")
    kept = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    wanted = {"model.safetensors"} if method == "--full" else {"adapter_model.safetensors", "adapter_config.json"}
    assert wanted | {"config.json"} <= kept and (kind == "vit" or "tokenizer.json" in kept)
    if kind != "vit":
        sublayer.load(tmp_path / "run" / "model")


def test_the_choice_is_told_and_can_be_another(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    recipe, line = plan(str(model), [], Choices(data=str(data)))
    assert recipe.data.objective == "classify-sequence" and recipe.lora is not None and recipe.lora.rank == 8
    assert "classify-sequence" in line and "an encoder" in line and "text and label" in line and "rank 8" in line
    recipe, line = plan(str(model), [], Choices(data=str(data), objective="masked", full=True))
    assert recipe.data.objective == "masked" and recipe.lora is None and "as asked for" in line


@pytest.mark.parametrize(("ending", "between"), [("csv", ","), ("tsv", "\t")])
def test_columns_of_tables_and_under_other_names(ending: str, between: str, tmp_path: Path) -> None:
    data = tmp_path / f"data.{ending}"
    rows = [f"{row['text']}{between}{row['label']}" for row in LABELLED]
    data.write_text("\n".join([f"body{between}topic", *rows]) + "\n")
    model = folder_of("encoder", tmp_path / "base")
    recipe, line = plan(str(model), ["data.text=body", "data.label=topic"], Choices(data=str(data)))
    assert recipe.data.objective == "classify-sequence" and "body and topic" in line
    with pytest.raises(ValueError, match=r"columns body, topic fit no objective for an encoder; .*text and label"):
        plan(str(model), [], Choices(data=str(data)))


def test_a_recipe_says_all_of_it_too(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'[model]\npath = "{model}"\n[data]\ntrain = "{data}"\n[lora]\nrank = 2\ntargets = ["query"]\n'
        '[train]\nsteps = 3\nbatch_tokens = 200\nkeep_memory = false\nlr_factors = { "head.*" = 2.0 }\n'
    )
    assert main(["finetune", str(recipe), "--out", str(tmp_path / "run"), "--quiet", "lora.alpha=6"]) == 0
    config = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 6
    again = load_recipe(tmp_path / "run" / "recipe.toml")
    assert again.train.lr_factors == {"head.*": 2.0} and again.lora is not None and again.lora.targets == ("query",)
    assert main(["finetune", str(tmp_path / "run" / "recipe.toml"), "--out", str(tmp_path / "2"), "--quiet"]) == 0
    one, two = (load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("run", "2"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Heads


@pytest.mark.parametrize("method", ["--full", "--lora=4"])
def test_labels_of_the_data_are_what_the_model_answers_with(method: str, tmp_path: Path) -> None:
    """A body without a head gets one; transformers and PEFT read the result and give the same logits."""
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base", head="none", pooler="tanh", init_std=0.1)
    more = ["train.epochs=20", "train.lr=1e-2", "train.best=accuracy", "train.batch_tokens=80"]
    assert finetune(model, data, tmp_path / "run", method, "--valid", str(data), *more) == 0
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["before"]["valid_accuracy"] < 0.5 < 0.9 < facts["after"]["valid_accuracy"]
    lm = sublayer.load(tmp_path / "run" / "model")
    answers = lm.classify([row["text"] for row in LABELLED])
    assert list(answers[0]) == sorted(COLOURS)
    right = [max(answer, key=answer.get) == row["label"] for answer, row in zip(answers, LABELLED, strict=True)]
    assert np.mean(right) == pytest.approx(facts["after"]["valid_accuracy"])
    if method == "--full":
        theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
        assert list(theirs.config.id2label.values()) == sorted(COLOURS)
    else:
        from peft import PeftModel

        base = transformers.BertForSequenceClassification.from_pretrained(model, num_labels=len(COLOURS))
        theirs = PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    ids = torch.tensor([lm.tokenizer.encode(LABELLED[0]["text"])])
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids).logits
        torch.testing.assert_close(lm.model(ids), expected, atol=1e-5, rtol=1e-5)
    merged = tmp_path / "merged"
    if method != "--full":
        assert main(["convert", str(model), str(merged), "--merge", str(tmp_path / "run" / "model")]) == 0
        again = sublayer.load(merged)
        torch.testing.assert_close(again.model(ids), expected, atol=1e-5, rtol=1e-5)
        assert list(again.classify("a red house")) == sorted(COLOURS)


def test_a_head_that_knows_the_labels_stays(tmp_path: Path) -> None:
    """Its order of labels stays too, though the alphabet has another."""
    order = ("white", "red", "green", "blue", "black")
    model = folder_of("encoder", tmp_path / "base", head="classifier", pooler="tanh", num_labels=5)
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {str(n): name for n, name in enumerate(order)}
    (model / "config.json").write_text(json.dumps(config))
    before = load_file(model / "model.safetensors")["classifier.weight"]
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    assert finetune(model, data, tmp_path / "run", "--full", "train.lr=1e-4", "train.steps=1") == 0
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")["classifier.weight"]
    torch.testing.assert_close(after, before, atol=1e-3, rtol=0)
    assert list(sublayer.load(tmp_path / "run" / "model").classify("a red house")) == list(order)


def test_a_new_head_keeps_the_body_and_the_pooler() -> None:
    model = sublayer.build(small("bert-base", head="none", pooler="tanh"), seed=3)
    model.origin = {"model_type": "bert"}
    new, fresh = rebuilt(model, config_with_head(model, "classifier", 3))
    assert sorted(fresh) == ["head.classifier.bias", "head.classifier.weight"]
    old = model.state_dict()
    assert all(torch.equal(tensor, old[name]) for name, tensor in new.state_dict().items() if name not in fresh)
    tokens = rebuilt(model, config_with_head(model, "token-classifier", 4))[0]
    assert tokens.config.pooler == "none" and tokens.head.classifier.out_features == 4


# Going on


class Killed(BaseException):
    pass


@pytest.mark.parametrize("method", ["--full", "--lora=4"])
@pytest.mark.parametrize("kind", ["gpt2", "encoder"])
def test_a_killed_run_goes_on_to_the_same_bytes(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of(kind, tmp_path / "base")
    more = [method, "train.steps=11", "train.save_every=3", "train.lr=1e-2", "model.dropout=0.1", "data.split=0.2"]
    more += ["train.eval_every=4", "train.best=loss"] + ["lora.dropout=0.1", "lora.dora=true"] * (method != "--full")
    assert finetune(model, data, tmp_path / "straight", *more) == 0
    learn = Trainer.learn
    for step in (5, 8, 11):

        def killed(self: Trainer, batches: Any, step: int = step) -> None:
            if self.state.step + 1 == step:
                raise Killed
            learn(self, batches)

        monkeypatch.setattr(Trainer, "learn", killed)
        with pytest.raises(Killed):
            finetune(model, data, tmp_path / "killed", *more, "--resume")
    monkeypatch.setattr(Trainer, "learn", learn)
    assert finetune(model, data, tmp_path / "killed", *more, "--resume") == 0
    name = "model.safetensors" if method == "--full" else "adapter_model.safetensors"
    one, two = ((tmp_path / run / "model" / name).read_bytes() for run in ("straight", "killed"))
    assert one == two
    assert losses(tmp_path / "straight") == losses(tmp_path / "killed")


def test_another_rank_is_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    assert finetune(model, data, tmp_path / "run", "--lora=4") == 0
    assert finetune(model, data, tmp_path / "run", "--lora=2", "--resume") == 1
    assert "was begun with lora.rank=4, and this recipe has 2" in capsys.readouterr().err
    assert finetune(model, data, tmp_path / "run", "--full", "--resume") == 1
    assert "was begun with lora." in capsys.readouterr().err


# What the assistant says

MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}",
)
TALKS = [
    [
        {"role": "system", "content": "Answer in kind."},
        {"role": "user", "content": "What is\n\nblue?"},
        {"role": "assistant", "content": "  The sky 🙂\n\nand the sea."},
        {"role": "user", "content": "And red?"},
        {"role": "assistant", "content": "A stone, naïve 今天."},
    ],
    [{"role": "user", "content": "river"}, {"role": "assistant", "content": "x"}],
]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by turns", "marked"])
def test_the_assistant_tokens_are_those_that_transformers_finds(template: str, tmp_path: Path) -> None:
    """Their mask needs {% generation %} in the template; ours must be the same with it and without."""
    folder = folder_of("decoder", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    ours = encode_chats([Row({"messages": talk}, "talks", 1) for talk in TALKS], Tokenizer.load(folder))
    for talk, (ids, learn) in zip(TALKS, ours, strict=True):
        expected = theirs.apply_chat_template(
            talk, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert learn.tolist() == expected["assistant_masks"]
        assert 0 < learn.sum() < len(ids)
    again = encode_chats([Row({"messages": as_sharegpt(talk)}, "talks", 1) for talk in TALKS], Tokenizer.load(folder))
    assert [(ids, learn.tolist()) for ids, learn in again] == [(ids, learn.tolist()) for ids, learn in ours]


def test_instructions_are_the_chats_they_stand_for(tmp_path: Path) -> None:
    """The same steps, to the last bit, as on messages written by hand. The first rows have no input."""
    rows = [ALPACA[1], ALPACA[3] | {"input": None}, ALPACA[0] | {"input": " \n"}, *ALPACA]
    chats = []
    for row in rows:
        turns = {"user": asked(row), "assistant": row["output"]}
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    model = folder_of("decoder", tmp_path / "base", max_positions=400)
    curves = []
    for name, given in (("alpaca", rows), ("chats", chats)):
        assert finetune(model, write_rows(tmp_path / f"{name}.jsonl", given), tmp_path / name, "train.steps=4") == 0
        curves.append(losses(tmp_path / name))
    assert curves[0] == curves[1]


def test_instructions_without_a_template(tmp_path: Path) -> None:
    """Prompt, empty line and completion, of which the completion is learned; for T5, prompt and answer."""
    data = write_rows(tmp_path / "data.jsonl", ALPACA)
    pairs = [(asked(row), row["output"]) for row in ALPACA]
    for kind, names, after, more in (
        ("gpt2", ("prompt", "completion"), "\n\n", []),
        ("decoder", ("prompt", "completion"), "\n\n", ["data.as_chat=false"]),  # it has a template, not to be used
        ("t5", ("source", "target"), "", []),
    ):
        model = folder_of(kind, tmp_path / kind, max_positions=400)
        rows = [dict(zip(names, (prompt + after, answer), strict=True)) for prompt, answer in pairs]
        written = write_rows(tmp_path / f"{kind}.jsonl", rows)
        for name, file in (("found", data), ("written", written)):
            assert finetune(model, file, tmp_path / f"{kind} {name}", "train.steps=4", *more) == 0
        assert losses(tmp_path / f"{kind} found") == losses(tmp_path / f"{kind} written")


def test_only_the_assistant_is_learned_from(tmp_path: Path) -> None:
    """The loss of a step is the mean over the assistant's tokens of what a plain pass over the chat gives them."""
    data = write_rows(tmp_path / "data.jsonl", [{"messages": talk} for talk in TALKS])
    model = folder_of("decoder", tmp_path / "base", max_positions=400)
    more = ["train.steps=1", "train.batch_tokens=2000", "data.max_length=300", "train.dtype=float32"]
    for layout in ("padded", "packed"):
        assert finetune(model, data, tmp_path / layout, *more, f"data.layout={layout}") == 0
    lm = sublayer.load(model)
    total, count = 0.0, 0
    for talk, answers in zip(TALKS, ([2, 4], [1]), strict=True):
        ids = lm.tokenizer.encode(lm.chat_prompt(talk, add_generation_prompt=False), special=False)
        scores = lm.model(torch.tensor([ids]))[0].log_softmax(-1).detach()
        for place in answers:
            begun = lm.tokenizer.encode(lm.chat_prompt(talk[:place]), special=False)
            said = lm.tokenizer.encode(talk[place]["content"] + "<|im_end|>", special=False)
            assert ids[len(begun) : len(begun) + len(said)] == said
            for offset, token in enumerate(said):
                total -= float(scores[len(begun) + offset - 1, token])
                count += 1
    for layout in ("padded", "packed"):
        assert losses(tmp_path / layout)[0] == pytest.approx(total / count, rel=1e-4)


def test_a_prompt_is_read_and_only_the_completion_learned(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", PROMPTS[:3])
    model = folder_of("gpt2", tmp_path / "base")
    more = ["train.steps=1", "train.batch_tokens=2000", "train.dtype=float32"]
    assert finetune(model, data, tmp_path / "run", *more) == 0
    lm = sublayer.load(model)
    total, count = 0.0, 0
    for row in PROMPTS[:3]:
        prompt = lm.tokenizer.encode(row["prompt"])
        answer = [*lm.tokenizer.encode(row["completion"], special=False), lm.tokenizer.special("eos")]
        values, _ = lm.logprobs(prompt, answer)
        total, count = total - sum(values), count + len(values)
    assert losses(tmp_path / "run")[0] == pytest.approx(total / count, rel=1e-4)


# Knobs


def test_class_weights_are_those_of_torch() -> None:
    model = sublayer.build(small("bert-base", head="classifier", pooler="tanh", num_labels=3), seed=0)
    from sublayer.data.batches import Batch

    torch.manual_seed(1)
    ids, labels, weights = torch.randint(2, 60, (8, 5)), torch.randint(0, 3, (8,)), [0.5, 2.0, 3.5]
    batch = Batch({"ids": ids}, labels, targets=8)
    loss = BatchLoss(model, class_weights=weights)
    found = loss(batch)[0] / loss.share(batch)
    expected = F.cross_entropy(model(ids), labels, weight=torch.tensor(weights))
    torch.testing.assert_close(found, expected)


def test_balanced_class_weights_are_those_of_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for n, row in enumerate(LABELLED) if row["label"] != "red" or n % 3 == 0]
    data = write_rows(tmp_path / "data.jsonl", rows)
    seen: list[Any] = []
    init = Trainer.__init__

    def spy(self: Trainer, *args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["class_weights"])
        init(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "__init__", spy)
    assert (
        finetune(folder_of("encoder", tmp_path / "base"), data, tmp_path / "run", "train.class_weights=balanced") == 0
    )
    labels = [row["label"] for row in rows]
    expected = compute_class_weight("balanced", classes=np.array(sorted(set(labels))), y=labels)
    np.testing.assert_allclose(seen[0], expected)


def test_lower_layers_learn_slower() -> None:
    model = sublayer.build(small("bert-base", head="classifier", pooler="tanh", num_labels=3), seed=0)
    factors = learning_rate_factors(model, 0.5, {"*.bias": 3.0, "pooler": 0.1})
    optimizer = make_optimizer(model, lr=1.0, factors=factors)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    expected = {
        "head.classifier.weight": 1.0, "head.classifier.bias": 3.0, "head.pooler.dense.weight": 0.1,
        "head.pooler.dense.bias": 0.3, "encoder.blocks.1.attention.sublayer.query.weight": 0.5,
        "encoder.blocks.0.attention.sublayer.query.weight": 0.25, "encoder.blocks.0.feed_forward.norm.bias": 0.75,
        "encoder.embeddings.tokens.weight": 0.125, "encoder.embeddings.norm.weight": 0.125,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    tied = sublayer.build(small("gpt2"), seed=0)
    assert learning_rate_factors(tied, 0.5)["head.logits.weight"] == 0.5**3  # the token matrix, two blocks below


def test_the_first_step_of_each_layer_is_as_long_as_its_rate(tmp_path: Path) -> None:
    """AdamW's first step is the learning rate itself, wherever the gradient is not tiny."""
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    more = [
        "--full",
        "train.steps=1",
        "train.lr=1e-3",
        "train.layer_decay=0.5",
        "train.weight_decay=0",
        "train.warmup=0",
    ]
    assert finetune(model, data, tmp_path / "run", *more, "train.schedule=constant", "train.clip=0") == 0
    before, after = (sublayer.load_model(path).state_dict() for path in (model, tmp_path / "run" / "model"))
    for name, rate in (("encoder.blocks.1", 5e-4), ("encoder.blocks.0", 2.5e-4), ("encoder.embeddings.norm", 1.25e-4)):
        for key in (key for key in before if key.startswith(name) and key.endswith("weight")):
            assert float((after[key] - before[key]).abs().max()) == pytest.approx(rate, rel=2e-2)


def test_frozen_weights_stay_to_the_bit(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    patterns = 'train.freeze=["embeddings.*", "encoder.blocks.0"]'
    assert finetune(model, data, tmp_path / "run", "--full", "train.lr=1e-2", patterns) == 0
    before, after = (sublayer.load_model(path).state_dict() for path in (model, tmp_path / "run" / "model"))
    same = {name for name in before if name in after and torch.equal(before[name], after[name])}
    frozen = {name for name in before if name.startswith(("encoder.embeddings.", "encoder.blocks.0."))}
    assert frozen <= same and not any(name.startswith("encoder.blocks.1.") for name in same)
    tied = sublayer.build(small("gpt2"), seed=0)
    freeze(tied, ["embeddings.*"])
    assert not tied.head.logits.weight.requires_grad  # it is the token matrix
    with pytest.raises(ValueError, match=r"train.freeze: no parameter is called 'embedings'; names are such as"):
        freeze(tied, ["embedings"])


def test_an_adapter_leaves_the_base_alone(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert finetune(model, data, tmp_path / "run", "train.lr=1e-2") == 0
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("kind", ["gpt2", "encoder"])
def test_a_whole_model_is_trained_in_a_copy(kind: str, tmp_path: Path) -> None:
    """Weights may be used where they lie in the file, under a new head too; training must not write there."""
    data = write_rows(tmp_path / "data.jsonl", PLAIN if kind == "gpt2" else LABELLED)
    model = folder_of(kind, tmp_path / "base", **({} if kind == "gpt2" else {"head": "none", "pooler": "tanh"}))
    before = (model / "model.safetensors").read_bytes()
    assert finetune(model, data, tmp_path / "run", "--full", "train.lr=1e-2") == 0
    assert (model / "model.safetensors").read_bytes() == before
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() != before


def test_an_adapter_in_one_product_learns_what_it_learns_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = sublayer.build(small("llama-7b"), dtype="float64", seed=0)
    sublayer.lora.add(model, rank=3, alpha=5)
    for name, parameter in model.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(2, 60, (4, 9))
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr("sublayer.lora.joined.LEAST", least)
        logits = model(ids)
        model.zero_grad()
        logits.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-8)
    assert found[0][1] and all(".lora." in name for name in found[0][1])


def test_an_adapter_in_one_product_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast it is as near to the exact gradients as beside the layer, where PEFT has it."""
    torch.manual_seed(0)
    model = sublayer.build(small("llama-7b"), seed=0)
    sublayer.lora.add(model, rank=3, alpha=5)
    for name, parameter in model.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=0.1)
    ids, weights = torch.randint(2, 60, (4, 40)), torch.randn(4, 40, 64)
    kind = model.device.type

    def gradient(least: int, half: bool) -> torch.Tensor:
        monkeypatch.setattr("sublayer.lora.joined.LEAST", least)
        model.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=half):
            logits = model(ids)
        (logits.float() * weights[..., : logits.size(-1)]).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact, beside, joined = gradient(10**9, False), gradient(10**9, True), gradient(1, True)
    assert (joined - exact).norm() < 1.5 * (beside - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(joined, beside)


@pytest.mark.parametrize("family", ["bert-base", "vit-b-16", "original-base"])
@pytest.mark.parametrize(
    "changes", [{}, {"placement": "pre", "final_norm": True}, {"positions": "rotary"}, {"window": 2}]
)
def test_a_label_for_the_first_token_is_what_a_whole_pass_gives(family: str, changes: dict[str, Any]) -> None:
    """In training only the first token goes through the last block, where that can be; the loss does not show it."""
    from sublayer.data.batches import Batch

    if family == "vit-b-16" and ("positions" in changes or "window" in changes):
        changes = {"placement": "sandwich"}
    shape = {"shape": "encoder", "num_decoder_layers": 0, "share_embeddings": False, "start_id": None}
    shape = shape if family == "original-base" else {}
    config = small(family, **shape, head="classifier", num_labels=3, **changes)
    model = sublayer.build(config, dtype="float64", seed=0)
    labels = torch.tensor([0, 2, 1, 1])
    if config.image_input:
        pixels = torch.rand(4, 3, 24, 24, dtype=torch.float64)
        batch, whole = Batch({"pixels": pixels}, labels, targets=4), {"ids": pixels}
    else:
        mask = torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]
        ids = torch.randint(2, 60, (4, 7))
        batch = Batch({"ids": ids}, labels, masks={"ids": mask}, targets=4)
        whole = {"ids": ids, "mask": mask}
    found = []
    for loss in (BatchLoss(model)(batch)[0], F.cross_entropy(model(**whole).float(), labels, reduction="sum")):
        model.zero_grad()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        found.append((loss.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_split_takes_every_row_once_and_the_same_ones_again(seed: int, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"text": f"row {n}"} for n in range(2000)])
    settings = DataSettings(train=str(data), split=0.2, split_seed=seed)

    def rows(settings: DataSettings, part: str) -> list[str]:
        source = open_source(settings, part)
        assert source is not None
        return [row.values["text"] for row in source.rows()]

    train, valid = rows(settings, "train"), rows(settings, "valid")
    assert sorted(train + valid) == sorted(f"row {n}" for n in range(2000))
    assert 0.16 < len(valid) / 2000 < 0.24  # 4.5 standard deviations
    assert rows(settings, "valid") == valid
    assert rows(dataclasses.replace(settings, split_seed=seed + 1), "valid") != valid
    write_rows(data, [{"text": f"row {n}"} for n in range(3000)])
    assert rows(settings, "valid")[: len(valid)] == valid


def test_the_best_model_by_a_metric_is_the_result(tmp_path: Path) -> None:
    """Validated with labels that are wrong, the more it learns the worse it is."""
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    turned = dict(zip(COLOURS, (*COLOURS[1:], COLOURS[0]), strict=True))
    rows = [row | {"label": turned[row["label"]]} for row in LABELLED]
    valid = write_rows(tmp_path / "valid.jsonl", rows)
    model = folder_of("encoder", tmp_path / "base")
    more = ["--full", "train.steps=40", "train.lr=1e-2", "train.eval_every=5", "--valid", str(valid)]
    assert finetune(model, data, tmp_path / "run", *more, "train.best=loss") == 0
    seen = [line["valid_loss"] for line in metrics(tmp_path / "run") if "valid_loss" in line]
    assert min(seen) < 0.8 * seen[-1]
    lm = sublayer.load(tmp_path / "run" / "model")
    answers = lm.classify([row["text"] for row in rows])
    mean = np.mean([-np.log(answer[row["label"]]) for answer, row in zip(answers, rows, strict=True)])
    assert mean == pytest.approx(min(seen), rel=1e-4)
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["after"]["valid_loss"] == min(seen)


# What is refused


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, decoder = folder_of("encoder", tmp_path / "encoder"), folder_of("gpt2", tmp_path / "gpt2")
    chatting = folder_of("decoder", tmp_path / "decoder")
    labelled = str(write_rows(tmp_path / "labelled.jsonl", LABELLED))

    def said(model: Path, data: str, *more: str) -> str:
        return refusal(capsys, str(model), "--data", data, "--out", str(tmp_path / "run"), *more)

    odd = str(write_rows(tmp_path / "odd.jsonl", [{"title": "a", "body": "b"}]))
    line = said(encoder, odd)
    assert "the columns title, body fit no objective for an encoder" in line and "text and label" in line
    other = str(write_rows(tmp_path / "other.jsonl", [{"text": "a pink house", "label": "pink"}]))
    line = said(encoder, labelled, "--valid", other)
    assert f"{other}, row 1: label 'pink' never occurs in the training data" in line
    alone = [CHATS[0], {"messages": [{"role": "user", "content": "hello?"}]}]
    silent = str(write_rows(tmp_path / "silent.jsonl", alone))
    assert f"{silent}, row 2: the chat has no assistant turn" in said(chatting, silent)
    chats = str(write_rows(tmp_path / "chats.jsonl", CHATS))
    assert "has no chat template" in said(decoder, chats)
    assert "lora.rank is 0; it must be at least 1" in said(encoder, labelled, "--lora", "0")
    assert "--full trains all weights" in said(encoder, labelled, "--full", "lora.rank=4")
    assert "objective 'chat' trains a model of shape decoder" in said(encoder, labelled, "--objective", "chat")
    assert "the model has 96 positions" in said(encoder, labelled, "data.max_length=500")
    assert "model.d_model cannot be changed in a trained model" in said(encoder, labelled, "model.d_model=8")
    assert "attention_dropout is 1.5; it must be at least 0 and below 1" in said(
        encoder, labelled, "model.attention_dropout=1.5"
    )
    assert "data.split and data.valid both" in said(encoder, labelled, "--valid", labelled, "data.split=0.5")
    assert "there is no data to learn from" in refusal(capsys, str(encoder))
    assert "does not exist" in said(tmp_path / "nowhere", labelled)
    assert "3 numbers for 5 labels" in said(encoder, labelled, "train.class_weights=[1, 2, 3]")
    assert "no parameter is called 'embeding'" in said(encoder, labelled, "--full", 'train.freeze=["embeding"]')
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'[model]\npath = "{encoder}"\n[data]\ntrain = "{labelled}"\n')
    assert main(["train", str(recipe)]) == 1
    assert "use sublayer finetune" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["finetune", str(encoder), "--data", labelled, "--full", "--lora", "4"])
    assert "not allowed with" in capsys.readouterr().err


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    assert finetune(folder_of("encoder", tmp_path / "base"), data, tmp_path / "run") == 0
    other = sublayer.load_model(folder_of("encoder", tmp_path / "other", d_model=48))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        sublayer.lora.load(other, tmp_path / "run" / "model")


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    model = folder_of("encoder", tmp_path / "base")
    assert finetune(model, data, tmp_path / "run", "--dry-run") == 0
    assert not (tmp_path / "run").exists()
    out = capsys.readouterr().out
    assert "trained" in out and "memory" in out
