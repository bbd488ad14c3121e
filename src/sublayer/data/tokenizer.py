"""Text to ids and back, through the `tokenizers` library, with the special tokens a checkpoint names."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from .tokenizer_files import MAX_BYTES, read_vocabulary

# What a folder may hold beside tokenizer.json; kept with the model when it is saved.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# SentencePiece's and tiktoken's files under the names that checkpoints give them; the first found is read.
VOCABULARIES = ("tokenizer.model", "spiece.model", "source.spm", "*.tiktoken", "*.model", "*.spm")
SHIFTED = "sentencepiece.bpe.model"  # fairseq's: the checkpoint's ids are others than the file's
# How a token that begins a word is marked: SentencePiece's mark, and GPT-2's letters for space, newline, tab, return.
_STARTS = ("▁", "Ġ", "Ċ", "ĉ", "č")


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.settings = settings or {}
        self.folder: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a folder, or one file of it: tokenizer.json, or a vocabulary of SentencePiece or tiktoken.

        A folder may hold the older vocabulary files of BERT and GPT-2 instead. Settings are read from the files beside.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise ValueError(f"{path} does not exist; expected a tokenizer's folder or file")
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        try:
            backend, names = _backend(path, settings)
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            if isinstance(error, ValueError):
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"{path}: the tokenizer cannot be read: {reason}") from None
        out = cls(backend, names | settings)
        out.folder = folder
        return out

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=special)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Ids of two texts in one, and for each id which of them it belongs to: 0 or 1."""
        return [(encoding.ids, encoding.type_ids) for encoding in self.backend.encode_batch(list(pairs))]

    def encode_words(self, texts: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
        """Ids of a text given in words, and the number of each id's word; -1 for what is put around the text."""
        between = " " if self._is_byte_level() else ""  # elsewhere every word is marked by itself
        rows = [[(between if place else "") + word for place, word in enumerate(words)] for words in texts]
        encodings = self.backend.encode_batch(rows, is_pretokenized=True)
        return [(e.ids, [-1 if word is None else word for word in e.word_ids]) for e in encodings]

    def encode_contexts(
        self, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[list[int], list[int], list[tuple[int, int]]]]:
        """Ids of a question and a context, which of them each id belongs to, and where in the context it stands.

        A place is that of the first character and that behind the last, without spaces; (-1, -1) outside the context.
        """
        out = []
        for (_, context), encoding in zip(pairs, self.backend.encode_batch(list(pairs)), strict=True):
            places = [
                _trim(context, *place) if sequence == 1 else (-1, -1)
                for place, sequence in zip(encoding.offsets, encoding.sequence_ids, strict=True)
            ]
            out.append((encoding.ids, encoding.type_ids, places))
        return out

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

    def special_ids(self) -> set[int]:
        """The ids that stand for no text."""
        return {number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}

    def sentinels(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1> …, which stand for the spans cut out of a text."""
        found: list[int] = []
        while (number := self.id_of(f"<extra_id_{len(found)}>")) is not None:
            found.append(number)
        return found

    def word_starts(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each id whether it begins a word; the first of a text always does, whatever stands here."""
        vocabulary = self.backend.get_vocab()
        prefix = json.loads(self.backend.to_str())["model"].get("continuing_subword_prefix")
        marked = any(token.startswith(_STARTS) for token in vocabulary)
        out = np.ones(max(vocabulary.values(), default=-1) + 1, bool)
        for token, number in vocabulary.items():
            out[number] = not token.startswith(prefix) if prefix else not marked or token.startswith(_STARTS)
        out[list(self.special_ids())] = True
        return out

    def fingerprint(self) -> str:
        """Tells whether two tokenizers make the same ids of the same text."""
        values = json.loads(self.backend.to_str())
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

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
        kept = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        if not (folder / "tokenizer_config.json").exists() or (self.settings and kept != self.settings):
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _is_byte_level(self) -> bool:
        return type(self.backend.decoder).__name__ == "ByteLevel"


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """A place in a text without the spaces at its ends."""
    inner = text[start:end]
    first = start + len(inner) - len(inner.lstrip())
    return first, max(first, start + len(inner.rstrip()))


def _backend(path: Path, settings: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and the special tokens that its own file names."""
    if path.is_dir():
        found = _in_folder(path, settings)
        return (found, {}) if isinstance(found, tokenizers.Tokenizer) else read_vocabulary(found, settings)
    if path.suffix == ".json":
        _check_size(path)
        return tokenizers.Tokenizer.from_file(str(path)), {}
    return read_vocabulary(path, settings)


def _check_size(path: Path) -> None:
    if path.exists() and path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MB; that is no tokenizer")


def _in_folder(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer | Path:
    """The tokenizer of a folder, or the path of the vocabulary that it is to be read from."""
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    pieces, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (whole, words, pieces, merges):
        _check_size(path)
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
    found = [path for name in VOCABULARIES for path in sorted(folder.glob(name)) if path.name != SHIFTED]
    if found:
        return found[0]
    raise ValueError(
        f"{folder} holds no tokenizer: expected tokenizer.json, vocab.txt, vocab.json and merges.txt, "
        "or a SentencePiece or tiktoken vocabulary"
    )


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
