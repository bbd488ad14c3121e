"""A run that was stopped, however and whenever, ends with the same bytes as one that never stopped."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support_training import metrics, recipe_of, recipe_values, same, trainer_of, weights

from sublayer.train import train
from sublayer.training import checkpoint
from sublayer.training.checkpoint import checkpoints
from sublayer.training.recipe import Recipe
from sublayer.training.trainer import Trainer

TIMES = {"time", "tokens_per_second", "utilisation"}


pytestmark = pytest.mark.usefixtures("own_cache")


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was measured, without what a clock has told."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(folder)]


class Killed(BaseException):
    """The end of a process, as far as one process can play it."""


def run_until(recipe: Recipe, folder: Path, step: int) -> None:
    """A run that is gone in the middle of step `step`."""
    trainer = trainer_of(recipe, folder)
    trainer.resume()
    learn = trainer.learn

    def killed(batches: Any) -> None:
        if trainer.state.step + 1 == step:
            raise Killed
        learn(batches)

    trainer.learn = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.run()


def finish(recipe: Recipe, folder: Path) -> Trainer:
    trainer = trainer_of(recipe, folder)
    trainer.resume()
    trainer.run()
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "adamw, dropout, average": {"model_dropout": 0.2, "train_ema": 0.9, "train_save_every": 7, "train_log_every": 5},
    "adafactor": {"train_optimizer": "adafactor", "train_save_every": 5, "train_log_every": 1},
    "muon": {"train_optimizer": "muon", "train_save_every": 10, "train_log_every": 3, "model_dropout": 0.1},
    "micro-batches": {"train_micro_tokens": 50, "model_dropout": 0.1, "train_save_every": 4, "train_log_every": 10},
    "a spike": {"train_spike": 1.02, "train_save_every": 3, "train_log_every": 4, "train_max_skips": 30},
    "evaluation": {"train_eval_every": 6, "train_eval_samples": 3, "train_save_every": 9, "train_log_every": 4},
}
OTHER: dict[str, dict[str, Any]] = {
    "masked": {"train_save_every": 7, "model_dropout": 0.1},
    "causal": {"train_save_every": 8, "data_max_length": 20, "train_batch_tokens": 40},
    "classify-image": {"train_save_every": 7, "data_crop": 1, "data_flip": True, "train_batch_tokens": 5},
}


@pytest.mark.parametrize("case", [*CASES, *OTHER])
def test_a_resumed_run_is_the_run_that_never_stopped(case: str, tmp_path: Path) -> None:
    objective = case if case in OTHER else "sequence-to-sequence"
    changes = {"train_steps": 30, "train_schedule": "cosine"} | (CASES | OTHER)[case]
    if case == "evaluation":
        changes["data_valid"] = str(tmp_path / f"{objective}.jsonl")
    recipe = recipe_of(tmp_path, objective, **changes)
    straight = finish(recipe, tmp_path / "straight")
    for step in (13, 21, 30):
        run_until(recipe, tmp_path / "stopped", step)
    resumed = finish(recipe, tmp_path / "stopped")
    assert resumed.state.step == 30
    assert same(weights(resumed), weights(straight))
    assert same(resumed._tensors(), straight._tensors())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    if case == "a spike":
        assert 0 < straight.state.skipped == resumed.state.skipped


def test_nothing_saved_yet_begins_at_the_beginning(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train_save_every=100)
    run_until(recipe, tmp_path / "stopped", 4)
    assert not checkpoints(tmp_path / "stopped" / "checkpoints")
    straight, resumed = finish(recipe, tmp_path / "straight"), finish(recipe, tmp_path / "stopped")
    assert same(weights(resumed), weights(straight)) and lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    """The schedule is constant, so that the first steps do not depend on how many there will be."""
    long = recipe_of(tmp_path, train_steps=9)
    finish(recipe_of(tmp_path, train_steps=5), tmp_path / "stopped")
    resumed, straight = finish(long, tmp_path / "stopped"), finish(long, tmp_path / "straight")
    assert same(weights(resumed), weights(straight))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    finish(recipe_of(tmp_path, train_steps=7, train_save_every=2, train_keep=2), tmp_path / "run")
    assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000006", "step-00000007"]


# A save that fails


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, train_steps=8, train_save_every=2, train_keep=5)
    trainer = trainer_of(recipe, tmp_path / "run")
    save_file, calls = checkpoint.save_file, iter(range(100))

    def full(tensors: Any, path: Path) -> None:
        if next(calls) in (1, 2):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert trainer.run().step == 8
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000008"]
    assert len(trainer.state.notes) == 2
    assert all("No space left on device" in note and "\n" not in note for note in trainer.state.notes)


def test_a_disk_still_full_at_the_end_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, train_save_every=2)
    trainer = trainer_of(recipe, tmp_path / "run")
    save_file, calls = checkpoint.save_file, iter(range(100))

    def full(tensors: Any, path: Path) -> None:
        if next(calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="step-00000006 could not be written: No space left on device"):
        trainer.run()
    monkeypatch.undo()
    resumed, straight = finish(recipe, tmp_path / "run"), finish(recipe, tmp_path / "straight")
    assert same(weights(resumed), weights(straight))


@pytest.mark.parametrize("name", ["trainer.json", "trainer.safetensors", "model.safetensors"])
def test_a_damaged_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    finish(recipe, tmp_path / "run")
    (folder,) = checkpoints(tmp_path / "run" / "checkpoints")
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    with pytest.raises(ValueError, match="step-00000006") as error:
        trainer_of(recipe, tmp_path / "run").resume()
    assert "\n" not in str(error.value)


# Real processes

WRAPPER = """
import os, shutil, signal, sys
from sublayer.training import checkpoint
place, count = sys.argv[1], int(sys.argv[2])
def deadly(function, after):
    def wrapped(*args, **kwargs):
        global count
        count -= 1
        if count < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        out = function(*args, **kwargs)
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return out
    return wrapped
if place == "tensors":
    checkpoint.save_file = deadly(checkpoint.save_file, after=True)
elif place == "before":
    checkpoint._flush = deadly(checkpoint._flush, after=False)
elif place == "rename":
    checkpoint.Path.rename = deadly(checkpoint.Path.rename, after=False)
elif place == "renamed":
    checkpoint.Path.rename = deadly(checkpoint.Path.rename, after=True)
elif place == "old":
    checkpoint.shutil.rmtree = deadly(shutil.rmtree, after=False)
from sublayer.cli import main
sys.exit(main(sys.argv[3:]))
"""


class Command:
    """`sublayer train` of one recipe file, in processes of its own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        from sublayer.training.recipe import make_recipe

        values = recipe_values(folder, **changes)
        sections = {name: {k: "none" if v is None else v for k, v in part.items()} for name, part in values.items()}
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(make_recipe(sections, "test").to_toml(), encoding="utf-8")
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "SUBLAYER_CACHE": str(folder / "cache")}

    def start(self, out: Path, *wrapper: str) -> subprocess.Popen[str]:
        program = ["-c", WRAPPER, *wrapper] if wrapper else ["-m", "sublayer"]
        command = [sys.executable, *program, "train", str(self.recipe), "--out", str(out), "--resume"]
        return subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)

    def finish(self, out: Path) -> bytes:
        process = self.start(out)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return (out / "model" / "model.safetensors").read_bytes()


def appears(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a file that has something in it."""
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_answered_with_a_checkpoint(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = Command(tmp_path, train_steps=400, model_dropout=0.1, train_log_every=10)
    process = command.start(tmp_path / "stopped")
    appears(tmp_path / "stopped" / "metrics.jsonl", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert number.name in errors and "--resume" in errors and "Traceback" not in errors
    (kept,) = checkpoints(tmp_path / "stopped" / "checkpoints")
    assert "step-00000400" > kept.name > "step-00000000"
    assert not (tmp_path / "stopped" / "model").exists()
    assert command.finish(tmp_path / "stopped") == command.finish(tmp_path / "straight")
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tensors", "before", "rename", "renamed", "old"])
def test_a_run_killed_inside_a_save_goes_on_exactly(place: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(train_steps=20, train_save_every=3, train_keep=1, train_ema=0.9, model_dropout=0.1)
    command = Command(tmp_path, **changes)
    straight = command.finish(tmp_path / "straight")
    for count in (0, 2):
        process = command.start(tmp_path / "stopped", place, str(count))
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    assert command.finish(tmp_path / "stopped") == straight
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert not list((tmp_path / "stopped" / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_twenty_times_at_random_is_the_same_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(train_save_every=7, train_log_every=5, train_ema=0.9, model_dropout=0.1)
    valid = dict(data_valid=str(tmp_path / "sequence-to-sequence.jsonl"), train_eval_every=200, train_eval_samples=2)
    command = Command(tmp_path, train_steps=2000, **changes, **valid)
    draws, kills = random.Random(0), 0
    stopped = tmp_path / "stopped"
    while kills < 20:
        process = command.start(stopped)
        # From before the first step to far into the run; the start alone takes some seconds.
        if draws.random() < 0.8:
            before = checkpoints(stopped / "checkpoints")[-1:]
            while process.poll() is None and checkpoints(stopped / "checkpoints")[-1:] == before:
                time.sleep(0.005)
            time.sleep(draws.random() * 0.4)
        else:
            time.sleep(draws.random() * 3)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills == 20
    reached = int(checkpoints(stopped / "checkpoints")[-1].name.removeprefix("step-"))
    assert 100 < reached < 2000
    assert command.finish(stopped) == command.finish(tmp_path / "straight")
    assert lines(stopped) == lines(tmp_path / "straight")


def test_the_model_of_a_finished_run_is_made_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train_ema=0.5)
    train(recipe, tmp_path / "run", quiet=True)
    path = tmp_path / "run" / "model" / "model.safetensors"
    before = path.read_bytes()
    path.unlink()
    train(recipe, tmp_path / "run", resume=True, quiet=True)
    assert path.read_bytes() == before


def test_a_run_keeps_its_tokenizer_when_the_cache_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained again, a vocabulary need not be the same; here it is made to differ."""
    settings = {"train_save_every": 2, "train_schedule": "constant", "train_warmup": 0}
    whole = recipe_of(tmp_path, "sequence-to-sequence", train_steps=6, **settings)
    train(whole, tmp_path / "whole", quiet=True)
    train(recipe_of(tmp_path, "sequence-to-sequence", train_steps=4, **settings), tmp_path / "again", quiet=True)
    monkeypatch.setenv("SUBLAYER_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("sublayer.start.open_tokenizer", lambda *rest: pytest.fail("a tokenizer was made again"))
    train(whole, tmp_path / "again", resume=True, quiet=True)
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
