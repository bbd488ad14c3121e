"""The vocabularies of SentencePiece and tiktoken, read from their files into a `tokenizers.Tokenizer`.

SentencePiece's file is a protobuf message; the few fields that matter are read here, so that neither package is needed.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

MAX_BYTES = 256 << 20
MAX_CHARSMAP = 4 << 20  # those in use have about 300 kB
MAX_RANK = 1 << 24
LONGEST_PIECE = 512  # characters; every way to cut a piece in two is tried

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece's types of pieces
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4  # and of models

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How text is cut before any merging. A tiktoken file does not say; those in use are told apart by their size.
_SPLITS: tuple[tuple[float, str | None], ...] = (
    (60_000, None),  # GPT-2's 50,000
    (140_000, _WORDS + _REST),  # cl100k; LLaMA 3 cuts in the same way
    (180_000, _WORDS.replace("{1,3}", "") + _REST),  # Qwen's 150,000: each digit for itself
    (math.inf, rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
     r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),  # o200k
)  # fmt: skip

Value = TypeVar("Value", int, bytes)


def read_vocabulary(path: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a SentencePiece or tiktoken file, told apart by content, and the special tokens it names.

    `settings` are those of the tokenizer_config.json beside it, which alone knows what is put around a text and which
    tokens come after the vocabulary.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MB; that is no vocabulary")
    data, names = path.read_bytes(), dict[str, str]()
    numbers = path.parent / "vocab.json"
    renumbered = path.suffix == ".spm" and numbers.exists()  # Marian: two models, one table of ids
    try:
        if re.match(rb"[A-Za-z0-9+/=]+ +[0-9]+\s", data):
            backend = tiktoken_tokenizer(read_ranks(data))
        else:
            model = read_sentencepiece(data)
            backend = sentencepiece_tokenizer(model.renumber(_numbers(numbers)) if renumbered else model)
            names = {f"{name}_token": token for name, token in model.named.items()}
        _add_later(backend, settings)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a vocabulary of SentencePiece or tiktoken: {error}") from None
    _surround(backend, names | dict(settings), renumbered or "extra_ids" in settings)
    return backend, names


def _numbers(path: Path) -> dict[str, int]:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_BYTES >> 20} MB")
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or sorted(map(str, values.values())) != sorted(map(str, range(len(values)))):
        raise ValueError(f"{path.name} must give each token one of the ids from 0 on")
    return values


def _add_later(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows: T5's sentinels, counted down to the end, and those with an id."""
    count, listed = settings.get("extra_ids"), settings.get("added_tokens_decoder")
    sentinels = range(count - 1, -1, -1) if isinstance(count, int) and 0 < count <= 10_000 else ()
    backend.add_special_tokens([f"<extra_id_{number}>" for number in sentinels])
    entries = listed.items() if isinstance(listed, dict) else ()
    for key, entry in sorted(((int(key), entry) for key, entry in entries), key=lambda item: item[0]):
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise ValueError(f"added_tokens_decoder has no content for the id {key}")
        number = backend.token_to_id(content)
        if key != (backend.get_vocab_size() if number is None else number):
            raise ValueError(f"added_tokens_decoder gives {content!r} the id {key}; the vocabulary would not")
        special = entry.get("special") is not False
        flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = AddedToken(content, special=special, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([token])


def _surround(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], ends: bool) -> None:
    """The tokens put before and after a text, where the settings ask for them."""
    single, used = ["$A"], {}
    for name, default in (("bos", False), ("eos", ends)):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = backend.token_to_id(token) if isinstance(token, str) else None
        if settings.get(f"add_{name}_token", default) is True and isinstance(token, str) and number is not None:
            single.insert(0 if name == "bos" else len(single), token)
            used[token] = number
    if used:
        pair = [*single, *("$B:1" if part == "$A" else f"{part}:1" for part in single)]
        backend.post_processor = processors.TemplateProcessing(single, pair, list(used.items()))


# What both kinds share


def every_merge(priority: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs that make a piece, the smallest priority first.

    SentencePiece and tiktoken merge two neighbours whenever the result is a piece, however it is cut; `tokenizers`
    wants each such pair by name.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, rank in priority.items():
        if len(piece) <= LONGEST_PIECE:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in priority and right in priority:
                    merges.append((rank, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def guards(reserved: Iterable[str]) -> list[pre_tokenizers.PreTokenizer]:
    """What cuts a reserved piece that a text spells out behind its first letter, so that no model takes it for one.

    Special tokens are found before a text is normalised; what NFKC makes of ＜s＞ is only text, and so is <0x41>.
    """
    is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
    bytes_, others = [], []
    for piece in reserved:
        if is_byte(piece):
            bytes_ = ["<(?=0x[0-9A-F]{2}>)"]
        elif len(piece) > 1:
            others.append(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})")
    pattern = "|".join([*bytes_, *others])
    return [pre_tokenizers.Split(Regex(pattern), "merged_with_previous")] if pattern else []


def piece_decoder(space: str = "▁", *, prefix: bool = True) -> decoders.Decoder:
    """Pieces to text: bytes joined to characters, the mark for a space, and the space put before a text."""
    steps: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


# SentencePiece


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A SentencePiece model: pieces in the order of their ids, with score and type, and how text is normalised."""

    pieces: list[tuple[str, float, int]]
    named: dict[str, str]  # bos, eos, unk, pad: those in the vocabulary
    kind: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    composes: bool = False  # the table is Unicode's NFKC, which joins a letter and its accents
    prefix: bool = True  # a space before the text
    collapse: bool = True  # many spaces are one, and none at the ends
    escape: bool = True  # a space is written ▁

    def renumber(self, ids: Mapping[str, int]) -> Pieces:
        """The same model for a vocabulary of its own: what it lacks is unknown, what is new never found in a text."""
        known = {piece: (piece, score, kind) for piece, score, kind in self.pieces}
        ordered = sorted(ids, key=ids.__getitem__)
        pieces = [known.get(piece, (piece, 0.0, CONTROL if piece == "<pad>" else UNUSED)) for piece in ordered]
        if not any(kind == UNKNOWN for *_, kind in pieces):
            raise ValueError("vocab.json lacks the model's token for what is unknown")
        return replace(self, pieces=pieces)


def read_sentencepiece(data: bytes) -> Pieces:
    """The model in a file's bytes. The numbers are those of sentencepiece_model.proto."""
    pieces: list[tuple[str, float, int]] = []
    trainer, normalizer = dict[int, int | bytes](), dict[int, int | bytes]()
    for number, value in _fields(data):
        if number in (1, 2, 3) and not isinstance(value, bytes):
            raise ValueError(f"field {number} is no message")
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(dict(_fields(value)), len(pieces)))
        elif number in (2, 3) and isinstance(value, bytes):
            (trainer if number == 2 else normalizer).update(_fields(value))
    kind = _take(trainer, 3, UNIGRAM)
    if kind not in (UNIGRAM, BPE, CHAR):
        raise ValueError(f"its model type is {kind}; known here are unigram ({UNIGRAM}), bpe ({BPE}) and char ({CHAR})")
    if _take(trainer, 24, 0):
        raise ValueError("it writes spaces after a word; only those that write them before can be read")
    types = {piece: type_ for piece, _, type_ in pieces}
    if len(types) != len(pieces):
        raise ValueError(f"{len(pieces) - len(types)} of its pieces occur twice")
    unknown_pieces = [piece for piece, type_ in types.items() if type_ == UNKNOWN]
    if len(unknown_pieces) != 1:
        raise ValueError(f"it has {len(unknown_pieces)} pieces for what is unknown; expected one")
    usual = {46: ("bos", b"<s>"), 47: ("eos", b"</s>"), 48: ("pad", b"<pad>")}
    said = {name: _take(trainer, number, piece).decode("utf-8", "replace") for number, (name, piece) in usual.items()}
    named = {name: piece for name, piece in said.items() if types.get(piece) == CONTROL}
    charsmap = _take(normalizer, 2, b"")
    if charsmap:
        _check_charsmap(charsmap)
    return Pieces(
        pieces=pieces,
        named=named | {"unk": unknown_pieces[0]},
        kind=kind,
        byte_fallback=bool(_take(trainer, 35, 0)),
        charsmap=charsmap,
        composes=b"nfkc" in _take(normalizer, 1, b""),
        prefix=bool(_take(normalizer, 3, 1)),
        collapse=bool(_take(normalizer, 4, 1)),
        escape=bool(_take(normalizer, 5, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message; whatever is no varint comes as its bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        if key & 7 == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, position = _varint(data, position)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"no field of a protobuf message at byte {position}")
        if size > len(data) - position:
            raise ValueError(f"it ends within a field, {size} bytes long at byte {position}")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(data[position : position + 10]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, position + count + 1
    raise ValueError(f"a number without end at byte {position}")


def _take(fields: Mapping[int, int | bytes], number: int, default: Value) -> Value:
    value = fields.get(number, default)
    if not isinstance(value, type(default)):
        raise ValueError(f"field {number} holds another type than expected")
    return value


def _piece(fields: dict[int, int | bytes], number: int) -> tuple[str, float, int]:
    text, score = _take(fields, 1, b""), _take(fields, 2, b"\0\0\0\0")
    if not text or len(score) != 4:
        raise ValueError(f"piece {number} has no text, or a score that is no number of 4 bytes")
    value: float = struct.unpack("<f", score)[0]
    type_ = _take(fields, 3, NORMAL)
    if not math.isfinite(value) or not NORMAL <= type_ <= BYTE:
        raise ValueError(f"piece {number} has the score {value} and the type {type_}")
    return text.decode("utf-8"), value, type_


def _check_charsmap(blob: bytes) -> None:
    """The table of replaced characters is a double-array trie; the library that walks it trusts every index."""
    size = int.from_bytes(blob[:4], "little")
    if size % 4 or not 0 < size <= min(len(blob) - 4, MAX_CHARSMAP):
        raise ValueError(f"its table of characters has {len(blob)} bytes and says {size}")
    units = np.frombuffer(blob, "<u4", size // 4, 4).astype(np.int64)
    texts = blob[4 + size :]
    texts.decode("utf-8")
    offsets, labels = (units >> 10) << ((units & 512) >> 6), units & 0x800000FF
    letters = np.arange(1, 256)
    seen, pending = np.zeros(len(units), bool), [int(offsets[0])]
    while pending:
        base = pending.pop()
        if base | 255 >= len(units):
            raise ValueError("its table of characters points outside of itself")
        children = base ^ letters
        children = children[(labels[children] == letters) & ~seen[children]]
        seen[children] = True
        pending += (children ^ offsets[children]).tolist()
    leaves = np.flatnonzero(seen & (units >> 8 & 1 == 1))
    starts = units[leaves ^ offsets[leaves]] & 0x7FFFFFFF
    if len(starts) and (starts.max() >= len(texts) or any(texts[start] & 0xC0 == 0x80 for start in starts.tolist())):
        raise ValueError("its table of characters points outside of its texts")


def sentencepiece_tokenizer(model: Pieces) -> tokenizers.Tokenizer:
    """A tokenizer that cuts text as SentencePiece does; its control pieces are special tokens."""
    ids = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
    of = {kind: [piece for piece, _, type_ in model.pieces if type_ == kind] for kind in range(NORMAL, BYTE + 1)}
    if model.byte_fallback and set(of[BYTE]) != {f"<0x{byte:02X}>" for byte in range(256)}:
        raise ValueError(f"it falls back on bytes, and has pieces for {len(of[BYTE])} of 256")
    users, unknown_piece = of[USER_DEFINED], of[UNKNOWN][0]
    core: models.Model
    if model.kind == UNIGRAM:
        lowest = min((score for _, score, type_ in model.pieces if type_ == NORMAL), default=0.0)
        fixed = {USER_DEFINED: 0.0, UNUSED: lowest - 1000.0}  # always taken, and never
        scores = [(piece, fixed.get(type_, score)) for piece, score, type_ in model.pieces]
        core = models.Unigram(scores, unk_id=ids[unknown_piece], byte_fallback=model.byte_fallback)
    else:
        priority = {piece: -score for piece, score, type_ in model.pieces if type_ == NORMAL}
        core = models.BPE(
            vocab=ids,
            merges=every_merge(priority, ids),
            unk_token=unknown_piece,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(users),
        )
    backend = tokenizers.Tokenizer(core)
    space = "▁" if model.escape else " "
    backend.normalizer = _normalizer(model, space)
    cuts = guards((*of[UNKNOWN], *of[CONTROL], *of[BYTE])) if users or model.kind == UNIGRAM else []
    if users:  # a user's own pieces are cut out, the longest where two begin
        pattern = "|".join(map(re.escape, sorted(users, key=len, reverse=True)))
        cuts.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = piece_decoder(space, prefix=model.prefix)
    special = [AddedToken(piece, special=True, normalized=False) for piece in (*of[UNKNOWN], *of[CONTROL])]
    backend.add_special_tokens(special)
    return backend


def _normalizer(model: Pieces, space: str) -> normalizers.Normalizer:
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if (
        steps and model.composes
    ):  # the library looks up no letter and accents that take 6 bytes or more: が or 가 in parts
        steps.insert(0, normalizers.NFC())
    if model.collapse:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {space}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.prefix:
        steps.append(normalizers.Prepend(space))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", space)])


# tiktoken


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank, which is its id too."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 2 or not re.fullmatch(rb"[0-9]{1,8}", parts[1]) or int(parts[1]) >= MAX_RANK:
            raise ValueError(f"line {number} is not a token in base64 and its rank")
        try:
            token = base64.b64decode(parts[0], validate=True)
        except ValueError as error:
            raise ValueError(f"line {number} is no base64: {error}") from None
        if not token or token in ranks:
            raise ValueError(f"line {number} has an empty token, or one that was there before")
        ranks[token] = int(parts[1])
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise ValueError(f"it lacks {len(missing)} of the 256 bytes" if missing else "two tokens have the same rank")
    return ranks


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be printed, the others from U+0100 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def tiktoken_tokenizer(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """Byte-level BPE from ranks; how text is cut into words follows from the size of the vocabulary."""
    letters = byte_letters()
    ids = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=every_merge(ids, ids), ignore_merges=True))
    split = next(split for size, split in _SPLITS if len(ranks) < size)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    words = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, whole]) if words else whole
    backend.decoder = decoders.ByteLevel()
    return backend
