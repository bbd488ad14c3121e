"""A folder, a file, or a name on the hub, to a path on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .tensors import CheckpointError

# Weights and text only: nothing that could be run is even fetched.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.tiktoken", "*.jinja", "1_Pooling/*")


def resolve(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).expanduser()
    if path.exists():
        if path.is_dir() and not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            if len(files) == 1:
                return files[0]
            raise CheckpointError(f"{path} has no config.json; expected a folder in Hugging Face's format")
        if path.is_file() and path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; expected a folder with config.json, or a .gguf file")
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return download(str(folder))
    raise CheckpointError(f"{path} does not exist; expected a folder, a .gguf file, or a name on the hub (org/name)")


def download(name: str) -> Path:
    """From the hub, with its progress bar and its cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name!r} is no folder here; to download it from the hub, install the extra: pip install 'sublayer[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as error:  # its errors come from several libraries; each means that there is nothing to load
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name!r} could not be downloaded ({reason}); without a network, give the folder that holds the model"
        ) from None
