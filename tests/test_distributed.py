"""Several processes, started by torchrun on the CPU, against one: the same losses and the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support_training import apart, metrics, recipe_of

from sublayer.hub import load_model
from sublayer.training.checkpoint import checkpoints

pytestmark = pytest.mark.slow
# An epsilon above the noise of summation, which AdamW would otherwise make steps of.
STEADY: dict[str, Any] = {"train_steps": 12, "train_eps": 1e-4, "train_clip": 0.5, "train_save_every": 5}
COMMAND = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


class Runs:
    """Runs of one recipe, each with its own number of processes and changes."""

    def __init__(self, folder: Path, objective: str = "sequence-to-sequence", **changes: Any) -> None:
        self.folder = folder
        changes = STEADY | {"data_valid": str(folder / f"{objective}.jsonl"), "train_eval_every": 6} | changes
        self.recipe = folder / "recipe.toml"
        text = recipe_of(folder, objective, **changes).to_toml()
        self.recipe.write_text(text, encoding="utf-8")

    def start(
        self, name: str, processes: int, *changes: str, script: tuple[str, ...] = ("-m", "sublayer")
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SUBLAYER_CACHE": str(self.folder / "cache")}
        launcher = [*COMMAND, str(processes)] if processes > 1 else []
        verb = ["train", str(self.recipe), *changes, "--resume", "--out", str(self.folder / name)]
        return subprocess.run(
            [sys.executable, *launcher, *script, *verb], env=environment, capture_output=True, text=True, timeout=120
        )

    def finish(self, name: str, processes: int, *changes: str) -> Path:
        done = self.start(name, processes, *changes)
        assert done.returncode == 0, done.stderr[-3000:]
        return self.folder / name

    def agree(self, one: str, other: str) -> None:
        """The same losses at every step, the same evaluations, and the same model."""
        first, second = (metrics(self.folder / name) for name in (one, other))
        assert len(first) == len(second) > 12
        for mine, theirs in zip(first, second, strict=True):
            assert mine.keys() - {"bleu", "chrf", "exact_match"} == theirs.keys() - {"bleu", "chrf", "exact_match"}
            for key in ("step", "loss", "gradient_norm", "tokens", "valid_loss", "valid_accuracy"):
                if key in mine:
                    assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (key, mine["step"])
        models = [load_model(self.folder / name / "model").state_dict() for name in (one, other)]
        assert apart(*models) < 1e-5


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Also where a step has fewer parts than processes, and where a process has several batches in a step."""
    runs = Runs(tmp_path, train_ema=0.9, train_micro_tokens=40, train_eval_samples=0, train_batch_tokens=90)
    runs.finish("one", 1)
    runs.finish("ddp", 2, "train.parallel=ddp")
    runs.agree("one", "ddp")
    runs.finish("fsdp", 2, "train.parallel=fsdp")
    runs.agree("one", "fsdp")


def test_two_processes_are_one_for_packed_rows(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "causal", train_optimizer="adafactor", data_max_length=30)
    runs.finish("one", 1)
    runs.finish("ddp", 2)
    runs.agree("one", "ddp")


def test_a_sharded_checkpoint_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    runs = Runs(tmp_path, train_ema=0.9, train_eval_samples=0, train_log_every=1)
    runs.finish("one", 1)
    runs.finish("fsdp", 2, "train.parallel=fsdp", "train.steps=7")
    (last,) = checkpoints(tmp_path / "fsdp" / "checkpoints")[-1:]
    assert last.name == "step-00000007" and not (last / "model.safetensors").exists()
    runs.finish("fsdp", 3, "train.parallel=fsdp")
    first, second = ([line for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "fsdp"))
    assert [line["step"] for line in second] == list(range(1, 13))
    assert [line["loss"] for line in second] == pytest.approx([line["loss"] for line in first], rel=1e-5)
    assert apart(*(load_model(tmp_path / name / "model").state_dict() for name in ("one", "fsdp"))) < 1e-5

    alone = runs.start("fsdp", 1, "train.parallel=fsdp")
    assert alone.returncode == 1 and alone.stderr.count("\n") == 1 and "torchrun" in alone.stderr
    plain = runs.start("fsdp", 1, "train.steps=20")
    assert plain.returncode == 1 and "Traceback" not in plain.stderr and "train.parallel" in plain.stderr


def test_a_checkpoint_of_two_processes_goes_on_with_one(tmp_path: Path) -> None:
    runs = Runs(tmp_path, train_eval_samples=0, train_log_every=4)
    runs.finish("one", 1)
    assert runs.start("ddp", 2, "train.steps=6").returncode == 0
    runs.finish("ddp", 1)
    first, second = (metrics(tmp_path / name)[-2:] for name in ("one", "ddp"))
    for mine, theirs in zip(first, second, strict=True):
        for key in mine.keys() & {"step", "loss", "tokens", "valid_loss"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
    assert apart(*(load_model(tmp_path / name / "model").state_dict() for name in ("one", "ddp"))) < 1e-5


SIGNALLED = """
import os, signal, sys
from sublayer.training.trainer import Trainer
update = Trainer._update
def signalled(self):
    if self.state.step == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return update(self)
Trainer._update = signalled
from sublayer.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_signal_to_one_process_stops_them_all_at_one_step(parallel: str, tmp_path: Path) -> None:
    """It comes in the middle of a step, when the others no longer ask."""
    runs = Runs(tmp_path, train_eval_samples=0)
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED, encoding="utf-8")
    done = runs.start("stopped", 2, f"train.parallel={parallel}", script=(str(script),))
    assert done.returncode != 0 and "SIGTERM" in done.stderr
    (kept,) = checkpoints(tmp_path / "stopped" / "checkpoints")[-1:]
    assert kept.name == "step-00000006"
    assert not (tmp_path / "stopped" / "model").exists()
    runs.finish("stopped", 2, f"train.parallel={parallel}")
    runs.finish("one", 1)
    runs.agree("one", "stopped")
