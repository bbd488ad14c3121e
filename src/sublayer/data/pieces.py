"""What each token adds to a text, in bytes: what a grammar needs to know of a vocabulary."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .tokenizer import Tokenizer

# Decoders that turn tokens into text one by one, apart from the first. What others make of one depends on the next.
KNOWN = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Pieces:
    """The bytes of each id; nothing for special tokens, and for ids that the tokenizer does not have."""

    first: list[bytes]  # at the beginning of a text, where SentencePiece leaves a space out
    later: list[bytes]


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """A text that is decoded whole is the first piece of its first token, and the later pieces of the others."""
    backend, special = tokenizer.backend, tokenizer.special_ids()
    state: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    other = sorted(kinds - KNOWN - {"none"})
    if other or any(part.get("stop") for part in parts):
        raise ValueError(f"constrained output needs to know what each token says; a decoder {state['type']!r} does not")
    tokens = {number: token for token, number in backend.get_vocab().items() if number not in special}
    size = max(tokens, default=-1) + 1
    if "ByteLevel" in kinds:
        alphabet = _alphabet()
        later = [_spelled(tokens.get(number, ""), alphabet) for number in range(size)]
        return Pieces(later, later)
    return _tried(tokenizer, tokens, size, "ByteFallback" in kinds)


def _tried(tokenizer: Tokenizer, tokens: dict[int, str], size: int, fallback: bool) -> Pieces:
    """What the decoder itself makes of each token, alone and behind another one."""
    numbers = list(tokens)
    alone = dict(zip(numbers, tokenizer.backend.decode_batch([[number] for number in numbers]), strict=True))
    anchor = next((number for number in numbers if alone[number].isalnum()), None)
    if anchor is None:
        raise ValueError("constrained output needs a tokenizer whose tokens say something; none has a letter")
    pairs = tokenizer.backend.decode_batch([[anchor, number] for number in numbers])
    first, later = [b""] * size, [b""] * size
    for number, pair in zip(numbers, pairs, strict=True):
        byte = BYTE.fullmatch(tokens[number]) if fallback else None
        if byte and int(byte[1], 16) > 127:  # a part of a character; the decoder waits for the rest
            first[number] = later[number] = bytes.fromhex(byte[1])
        else:
            first[number], later[number] = alone[number].encode(), pair[len(alone[anchor]) :].encode()
    return Pieces(first, later)


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: those that are printed stand for themselves, the others come after the 255th."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _spelled(token: str, alphabet: dict[str, int]) -> bytes:
    spelled = [alphabet.get(letter, -1) for letter in token]
    return token.encode() if -1 in spelled else bytes(spelled)  # an added token is plain text
