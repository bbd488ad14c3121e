"""Text to ids and back, through the `tokenizers` library, with the special tokens a checkpoint names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

# What a folder may hold beside tokenizer.json; kept with the model when it is saved.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_BYTES = 256 << 20


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.settings = settings or {}
        self.folder: Path | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json, or from the older vocabulary files of BERT and GPT-2."""
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        try:
            backend = _backend(folder, settings)
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            if isinstance(error, ValueError):
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"{folder}: the tokenizer cannot be read: {reason}") from None
        out = cls(backend, settings)
        out.folder = folder
        return out

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def special(self, name: str) -> int | None:
        """The id of the mask, pad, bos, eos … token, by the name the checkpoint gives it."""
        token = self.settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return self.id_of(token)
        usual = {"mask": ("[MASK]", "<mask>"), "pad": ("[PAD]", "<pad>")}.get(name, ())
        return next((self.id_of(token) for token in usual if self.id_of(token) is not None), None)

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a character that the vocabulary lacks, as SentencePiece writes it."""
        return re.fullmatch(r"<0x[0-9A-F]{2}>", self.backend.id_to_token(token) or "") is not None

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def save(self, folder: Path) -> None:
        """tokenizer.json beside the model, with the files that came with it."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES[1:]:
            if self.folder is not None and (self.folder / name).exists() and not self.folder.samefile(folder):
                shutil.copy2(self.folder / name, folder / name)
        temporary = folder / ".tokenizer.json.tmp"
        self.backend.save(str(temporary))
        temporary.replace(folder / "tokenizer.json")
        if not (folder / "tokenizer_config.json").exists():
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _backend(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    pieces, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (whole, words, pieces, merges):
        if path.exists() and path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MB; that is no tokenizer")
    if whole.exists():
        return tokenizers.Tokenizer.from_file(str(whole))
    if words.exists():
        lower = settings.get("do_lower_case", True) is not False
        chinese, accents = settings.get("tokenize_chinese_chars", True) is not False, settings.get("strip_accents")
        return tokenizers.BertWordPieceTokenizer(
            str(words), lowercase=lower, strip_accents=accents, handle_chinese_chars=chinese
        )._tokenizer
    if pieces.exists() and merges.exists():
        return _byte_level(pieces, merges, settings)
    raise ValueError(f"{folder} holds no tokenizer: expected tokenizer.json, vocab.txt, or vocab.json and merges.txt")


def _byte_level(pieces: Path, merges: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's vocabulary, or that of RoBERTa and BART, which put a text between <s> and </s>."""
    prefix = settings.get("add_prefix_space", False) is True
    out = tokenizers.ByteLevelBPETokenizer(str(pieces), str(merges), add_prefix_space=prefix)._tokenizer
    named = (settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
    names = [token.get("content") if isinstance(token, dict) else token for token in named]
    names += ["<|endoftext|>", "<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    out.add_special_tokens([name for name in names if isinstance(name, str) and out.token_to_id(name) is not None])
    first, last = out.token_to_id("<s>"), out.token_to_id("</s>")
    if first is not None and last is not None:
        out.post_processor = tokenizers.processors.RobertaProcessing(("</s>", last), ("<s>", first), True, prefix)
    return out


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
