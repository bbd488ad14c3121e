"""The recipes that come with the package run and leave what they promise; what is wrong is told in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support_training import (
    LABELLED,
    PAIRS,
    TEXTS,
    metrics,
    recipe_of,
    recipe_values,
    write_pictures,
    write_rows,
)

import sublayer
from sublayer.cli import main
from sublayer.data import Tokenizer
from sublayer.hub import load_model
from sublayer.training.recipe import BUILT_IN, Recipe, TrainSettings, find_recipe, load_recipe, make_recipe

RECIPES = sorted(path.stem for path in BUILT_IN.glob("*.toml"))


pytestmark = pytest.mark.usefixtures("own_cache")


# The recipes of the package


def small_changes(name: str, folder: Path) -> list[str]:
    model = {"d_model": 16, "d_ff": 32, "num_heads": 2}
    config = sublayer.preset(load_recipe(find_recipe(name)).model["preset"])
    model |= {side: 1 for side in ("num_encoder_layers", "num_decoder_layers") if getattr(config, side)}
    model |= {"num_kv_heads": 1} if config.num_kv_heads else {}
    model |= {"head_dim": 8} if config.head_dim else {}
    changes = [f"model.{key}={value}" for key, value in model.items()]
    changes += ["train.steps=20", "train.batch_tokens=64", "train.device=cpu", "train.keep_memory=false"]
    changes += ["train.eval_every=10", "train.save_every=10", "train.eval_samples=2", "train.eval_tokens=200"]
    if name == "vit":
        pictures = write_pictures(folder / "pictures", count=6)
        return [*changes, f"data.train={pictures}", f"data.valid={pictures}"]
    changes += ["tokenizer.vocab_size=300", "data.max_length=24"]
    if name == "translate":
        path = write_rows(folder / "pairs.jsonl", PAIRS)
    else:
        path = folder / "text.txt"
        path.write_text("\n\n".join(TEXTS * 5), encoding="utf-8")
    return [*changes, f"data.train={path}", f"data.valid={path}"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_leaves_what_it_promises(name: str, tmp_path: Path) -> None:
    changes, out = small_changes(name, tmp_path), tmp_path / "run"
    assert main(["train", f"recipes/{name}.toml", *changes, "--out", str(out), "--quiet"]) == 0
    model = load_model(out / "model")
    assert all(bool(tensor.isfinite().all()) for tensor in model.parameters())
    if name != "vit":
        assert Tokenizer.load(out / "model").decode(Tokenizer.load(out / "model").encode("the lazy dog")).strip()
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [10, 20]
    assert [line["step"] for line in lines if "valid_loss" in line] == [10, 20]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "finished" in page and "<svg" in page
    assert load_recipe(out / "recipe.toml") == load_recipe(find_recipe(name), changes)


def test_test_data_and_tensorboard_are_heeded(tmp_path: Path) -> None:
    """The board's file, read by TensorBoard itself, says what metrics.jsonl says; data.test is read at the end."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes, out = small_changes("translate", tmp_path), tmp_path / "run"
    pairs = tmp_path / "test.tsv"
    pairs.write_text("one\teins\ntwo\tzwei\n", encoding="utf-8")
    changes += ["train.tensorboard=true", f"data.test={pairs}"]
    assert main(["train", "translate", *changes, "--out", str(out), "--quiet"]) == 0
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    lines = metrics(out)
    told = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in told
    ]
    (tested,) = [line for line in lines if "test_loss" in line]
    assert (
        tested["step"] == 20 and 0.0 <= tested["test_bleu"] <= 100.0 and tested["test_exact_match"] in (0.0, 0.5, 1.0)
    )


def test_seven_recipes_come_with_the_package_and_are_found_by_name(tmp_path: Path) -> None:
    assert RECIPES == ["bart", "bert", "gpt", "llama", "t5", "translate", "vit"]
    for name in RECIPES:
        assert find_recipe(name) == BUILT_IN / f"{name}.toml"
        assert find_recipe(f"recipes/{name}.toml").samefile(BUILT_IN / f"{name}.toml")
    with pytest.raises(ValueError, match=r"recip.*did you mean 'translate'"):
        find_recipe("translat")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_written_out_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(find_recipe(name), ["train.micro_tokens=64", "data.cache=/a b/'c", "train.save_every=none"])
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.toml") == recipe
    assert recipe.train.save_every is None and recipe.data.cache == "/a b/'c"


# What a recipe may say


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.stpes=3", r"train.*'?stpes.*did you mean 'steps'"),
        ("trian.steps=3", r"section.*trian.*did you mean 'train'"),
        ("data.objectve='causal'", r"did you mean 'objective'"),
        ("data.objective='causl'", r"data\.objective.*did you mean 'causal'"),
        ("model.d_modle=3", r"did you mean 'd_model'"),
        ("tokenizer.vocabsize=3", r"did you mean 'vocab_size'"),
        ("tokenizer.kind=bp", r"tokenizer\.kind.*did you mean 'bpe'"),
        ("train.optimizer=adamv", r"train\.optimizer.*did you mean 'adamw'"),
        ("train.schedule=cosin", r"train\.schedule.*did you mean 'cosine'"),
        ("train.steps=many", r"train\.steps is 'many'; expected int"),
        ("train.steps=1.5", r"train\.steps is 1\.5; expected int"),
        ("train.steps=true", r"train\.steps is True; expected int"),
        ("train.lr=fast", r"train\.lr is 'fast'; expected float or none"),
        ("train.lr=nan", r"train\.lr is nan"),
        ("train.steps=inf", r"train\.steps is inf"),
        ("train.steps=0", r"train\.steps is 0; it must be at least 1"),
        ("train.lr=-1", r"train\.lr is -1\.0; it must not be negative"),
        ("train.label_smoothing=1.0", r"must be below 1"),
        ("train.betas=[0.9]", r"train\.betas"),
        ("train.average=5", r"raise train\.keep"),
        ("data.max_length=1", r"data\.max_length is 1; it must be at least 2"),
        ("data.mask_probability=1.5", r"between 0 and 1"),
        ("data.names=[1, 2]", r"data\.names is 1; expected str"),
        ("steps=3", r"section\.key=value"),
        ("train.steps", r"section\.key=value"),
        ("train.nonfinite=ignore", r"train\.nonfinite"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "gpt", change, "--out", str(tmp_path / "run")]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    with pytest.raises(ValueError, match=message):
        load_recipe(find_recipe("gpt"), [change])


@pytest.mark.parametrize("text", ["[train\nsteps = 3", "train = 3", "[train.steps]\nx = 1", "\xff\xfe"])
def test_a_file_that_is_no_recipe_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_bytes(text.encode("latin-1"))
    assert main(["train", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "run")]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and ("bad.toml" in errors or "train.steps" in errors)


def test_an_optimiser_that_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adafactor.*train\.parallel=ddp"):
        TrainSettings(optimizer="adafactor", parallel="fsdp")


def test_every_setting_survives_being_written(tmp_path: Path) -> None:
    """Also None, lists, and text with quotes and backslashes."""
    train = TrainSettings(micro_tokens=7, lr=None, betas=(0.5, 0.25), save_every=None, eps=1e-12)
    values = recipe_values(tmp_path)
    recipe = make_recipe({"data": values["data"] | {"train": ['a"b\\c', "é\n"], "names": ["x"]}}, "test")
    recipe = dataclasses.replace(recipe, train=train, model={"preset": "gpt2", "norm_eps": 1e-6})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.toml") == recipe


# The run's folder


def written(recipe: Recipe, folder: Path) -> str:
    path = folder / "own.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    return str(path)


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(recipe_of(tmp_path), tmp_path)
    before = {file for file in tmp_path.rglob("*") if "cache" not in file.parts}
    assert main(["train", path, "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("parameters", "tokens", "epochs", "memory", "time"))
    assert {file for file in tmp_path.rglob("*") if "cache" not in file.parts} == before


def test_a_run_is_never_trained_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(recipe_of(tmp_path), tmp_path), tmp_path / "run"
    command = ["train", path, "--out", str(out), "--quiet"]
    assert main(command) == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert main(command) == 1
    assert "already holds a run; add --resume" in capsys.readouterr().err
    for change in ("train.lr=0.5", "data.max_length=30", "model.d_ff=100", "train.seed=1", "tokenizer.vocab_size=301"):
        assert main([*command, change, "--resume"]) == 1
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and change.partition("=")[0] in errors and "another --out" in errors
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    (tmp_path / "file").write_text("")
    assert main(["train", path, "--out", str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err


# Nonsense in the data

HUGE = "x" * (10 << 20)


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("objective", "content", "message"),
    [
        ("causal", b"", "empty"),
        ("causal", b"\n\n  \n", "empty"),
        ("sequence-to-sequence", jsonl({"source": "", "target": "b"}), "empty"),
        ("sequence-to-sequence", jsonl(PAIRS[0], {"sourec": "a", "target": "b"}), "row 2"),
        ("sequence-to-sequence", jsonl(*PAIRS[:2]) + b"{'source': 1\n", "row 3"),
        ("sequence-to-sequence", jsonl(PAIRS[0], {"source": 5, "target": "b"}), "row 2"),
        ("sequence-to-sequence", jsonl(*PAIRS[:2]) + b'{"source": "\xff\xfe", "target": "b"}\n', "row 3"),
        ("sequence-to-sequence", jsonl(PAIRS[0], {"source": HUGE, "target": "b"}), "row 2"),
        ("classify-sequence", jsonl(*LABELLED[:2], {"text": "a thing"}), "row 3"),
        ("classify-sequence", jsonl(*LABELLED[:2], {"text": "a thing", "label": ""}), "row 3"),
        ("classify-tokens", jsonl({"words": ["a", "b"], "tags": ["O"]}), "row 1"),
        ("find-span", jsonl({"question": "q", "context": "c", "answer": "not there"}), "row 1"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)  # fmt: skip
def test_bad_data_is_one_line_with_file_and_row(
    objective: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, objective)
    bad = tmp_path / ("bad.txt" if objective == "causal" else "bad.jsonl")
    bad.write_bytes(content)
    out = tmp_path / "run"
    command = ["train", written(recipe, tmp_path), f"data.train={bad}", "--out", str(out)]
    assert main([*command, "--quiet"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors[:500]
    assert bad.name in errors and message in errors and len(errors) < 500
    assert not out.exists()
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "tokenizers" not in path.parts]
    assert not kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.train=missing.jsonl", "missing.jsonl"),
        ("data.train=[]", "no file"),
        ("data.valid=missing.jsonl", "missing.jsonl"),
        ("data.target=answer", "answer"),
        ("model.vocab_size=100", r"model.vocab_size is 100, and the tokenizer has"),
        ("model.preset=gpt2", "encoder-decoder"),
        ("model.preset=gpt22", "gpt2"),
        ("model.num_heads=3", "num_heads"),
        ("tokenizer.path=missing", "missing"),
        ("train.metric=blue", "blue"),
    ],
)
def test_what_does_not_fit_together_is_one_line(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, data_valid=str(tmp_path / "sequence-to-sequence.jsonl"))
    command = ["train", written(recipe, tmp_path), change, "--out", str(tmp_path / "run"), "--quiet"]
    assert main(command) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and message in errors
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model").exists()


def test_a_label_that_is_new_in_the_validation_data_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    valid = write_rows(tmp_path / "valid.jsonl", [LABELLED[0], {"text": "a thing", "label": "purple"}])
    recipe = recipe_of(tmp_path, "classify-sequence", data_valid=str(valid))
    assert main(["train", written(recipe, tmp_path), "--out", str(tmp_path / "run"), "--quiet"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "valid.jsonl, row 2" in errors and "'purple'" in errors
    assert not (tmp_path / "run").exists()


def test_empty_rows_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, holes = (tmp_path / name for name in ("full.jsonl", "holes.jsonl"))
    full.write_bytes(jsonl(*PAIRS))
    holes.write_bytes(b"\n" + jsonl(*PAIRS[:3], {"source": "", "target": "b"}) + b" \n" + jsonl(*PAIRS[3:]))
    path = written(recipe_of(tmp_path), tmp_path)
    models = []
    for data in (full, holes):
        assert main(["train", path, f"data.train={data}", "--out", str(tmp_path / data.stem)]) == 0
        models.append((tmp_path / data.stem / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if "skipped" in line] == [f"{holes}: skipped 1 empty (first: {holes}, row 5)"]


def test_bad_rows_are_left_out_and_counted_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(jsonl(*PAIRS[:3]) + b"nonsense\n" + jsonl(*PAIRS[3:], {"source": "", "target": "b"}))
    command = ["train", written(recipe_of(tmp_path), tmp_path), f"data.train={bad}", "data.on_error=skip"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    errors = capsys.readouterr().err
    assert "skipped" in errors and "row 4" in errors
    assert metrics(tmp_path / "run")
