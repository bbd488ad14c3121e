"""The tokenizer that a checkpoint brings with it: in its folder, or inside a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    if path.suffix != ".gguf":
        return Tokenizer.load(path)
    from .gguf import read_gguf
    from .gguf_tokenizer import tokenizer_from_gguf

    metadata = read_gguf(path).metadata
    return Tokenizer(tokenizer_from_gguf(metadata), gguf_settings(metadata))


def gguf_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template needs of a GGUF file."""
    tokens, out = metadata.get("tokenizer.ggml.tokens"), {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            out[f"{name}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return out | ({"chat_template": template} if isinstance(template, str) else {})
