"""The READMEs keep their promises: their Python runs, prints what it says, and names commands that exist."""

from __future__ import annotations

import argparse
import pathlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from sublayer.cli import _parser

ROOT = pathlib.Path(__file__).parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"


@dataclass(frozen=True)
class Fence:
    info: str  # what follows the opening backticks: "python", "python no-run", "sh"
    line: int  # of the first line of code, counted from 1
    code: str


def fences(path: pathlib.Path) -> list[Fence]:
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [Fence(match[1], text.count("\n", 0, match.start(2)) + 1, match[2]) for match in found]


def python(path: pathlib.Path) -> list[Fence]:
    return [fence for fence in fences(path) if fence.info.split()[:1] == ["python"]]


def prose(path: pathlib.Path) -> str:
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def named_commands(path: pathlib.Path) -> str:
    """Every line of a shell block and every piece of inline code: where a reader looks for a command."""
    shell = [line for fence in fences(path) if fence.info == "sh" for line in fence.code.splitlines()]
    return "\n".join([*shell, *re.findall(r"`([^`\n]+)`", prose(path))])


def test_every_python_block_runs_and_prints_what_its_comments_say(capsys):
    blocks = [fence for fence in python(ENGLISH) if "no-run" not in fence.info]
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for block in blocks:
        # Empty lines in front make a traceback name the right line of the file.
        exec(compile("\n" * (block.line - 1) + block.code, str(ENGLISH), "exec"), namespace)
        promised = re.findall(r"^ *print\(.*\)  # (.+)$", block.code, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == promised, f"README.md, the block at line {block.line}"


def test_both_languages_have_the_same_code():
    assert [(f.info, f.code) for f in python(CHINESE)] == [(f.info, f.code) for f in python(ENGLISH)]
    assert [f.info for f in fences(CHINESE)] == [f.info for f in fences(ENGLISH)]


def test_both_languages_have_the_same_headings_and_link_to_each_other():
    english, chinese = (re.findall(r"^(#+) ", prose(path), re.MULTILINE) for path in (ENGLISH, CHINESE))
    assert Counter(english) == Counter(chinese)
    assert english == chinese, "the headings are in another order"
    assert f"({CHINESE.name})" in ENGLISH.read_text(encoding="utf-8")
    assert f"({ENGLISH.name})" in CHINESE.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [ENGLISH, CHINESE, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_command_named_exists(path):
    commands = named_commands(path)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"\bmake ([a-z][\w-]*)", commands))
    assert {"lint", "test-all"} <= made if path.name == "CONTRIBUTING.md" else {"demo", "test"} <= made
    assert made <= targets
    verbs = next(a.choices for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(re.findall(r"^sublayer ([a-z]\S*)", commands, re.MULTILINE)) <= set(verbs)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", prose(path)):
        assert (path.parent / target).exists(), target
