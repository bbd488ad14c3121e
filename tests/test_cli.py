"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sublayer.cli import main


def test_presets_table_and_json(capsys):
    assert main(["presets"]) == 0
    table = capsys.readouterr().out
    assert "gpt2" in table
    assert "124,439,808" in table
    assert main(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["parameters"] for row in rows}["llama-2-70b"] == 68_976_648_192


def test_demo_runs_every_family_and_learns(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    for family in ("original Transformer", "BERT", "GPT-2", "LLaMA", "T5", "BART", "Marian", "ViT"):
        assert family in out
    assert "0 1 2 3 4 5 6 0 1 2 3 4 5 6 0 1" in out


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
