"""Imports point one way, and importing the package stays light."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import sublayer

ROOT = pathlib.Path(sublayer.__file__).parent
# What each room may import, besides itself.
ALLOWED = {
    "config": set(),
    "presets": {"config"},
    "core": {"config"},
    "models": {"config", "core"},
    "data": {"config"},
    "hub": {"config", "core", "models", "data"},
    "training": {"config", "core", "models", "data"},
    "generation": {"config", "core", "models", "data"},
    "inspection": {"config", "core", "models", "data"},
    "lora": {"config", "core", "models", "hub"},
    "lm": {"config", "core", "models", "data", "hub", "generation", "lora"},
    "serving": {"lm", "lora", "config", "core", "models", "data", "hub", "training", "generation", "inspection"},
}


def imported_rooms(path: pathlib.Path) -> set[str]:
    package = ("sublayer", *path.relative_to(ROOT).with_suffix("").parts)[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module or "").split(".") if node.module else ())))
            names = [module] if module != "sublayer" else [f"sublayer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("sublayer.")}
    return rooms


def test_imports_point_one_way():
    checked = 0
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ALLOWED:
            foreign = imported_rooms(path) - {room} - ALLOWED[room]
            assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"
            checked += 1
    assert checked > 20


def test_import_is_light():
    """Not even torch is loaded before something needs it."""
    code = "import sublayer, sys; sublayer.preset('gpt2'); print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "numpy", "transformers", "tokenizers", "rich", "safetensors"):
        assert f"'{heavy}'" not in out


def test_every_public_name_resolves():
    for name in sublayer.__all__:
        assert getattr(sublayer, name) is not None
