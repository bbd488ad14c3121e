"""The command line as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from sublayer import demo
from sublayer.cli import main


def test_presets_table_and_json(capsys):
    assert main(["presets"]) == 0
    table = capsys.readouterr().out
    assert "gpt2" in table
    assert "124,439,808" in table
    assert main(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["parameters"] for row in rows}["llama-2-70b"] == 68_976_648_192


def test_demo_in_small_trains_translates_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SUBLAYER_CACHE", str(tmp_path / "cache"))
    small = ["train.steps=20", "data.corpus_size=1000", "train.eval_samples=4", "train.eval_every=none"]
    assert demo.run(str(tmp_path / "demo"), small, tested=20) == 0
    out = capsys.readouterr().out
    assert "of 20 texts with values never seen in training are exactly right" in out
    assert all(kind in out for kind in ("date", "time", "number", "price", "unit", "duration"))
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()
    # The folder it leaves works with the other verbs, and the line it ends with is a command that runs.
    command = out[out.index("Next: ") :].split("Next: ")[1].splitlines()[0]
    assert main(shlex.split(command)[1:]) == 0
    assert main(["generate", str(tmp_path / "demo" / "model"), "<de> 5 May", "--max-new-tokens", "5"]) == 0


@pytest.mark.slow
def test_demo_gets_nearly_all_unseen_values_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SUBLAYER_CACHE", str(tmp_path / "cache"))
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    right = re.search(r"([0-9.]+)% of 1,000 texts", capsys.readouterr().out)
    assert right is not None and float(right[1]) >= 98.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preset"], "did you mean 'presets'?"),
        (["presets", "--jsn"], "did you mean '--json'?"),
        ([], "VERB"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m sublayer presets --json | head -c 20"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stderr == ""
