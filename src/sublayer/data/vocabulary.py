"""What the objectives need to know of a tokenizer, looked up once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .settings import TokenizerSettings
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    start_role: str = "pad"

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: TokenizerSettings) -> Vocabulary:
        return cls(tokenizer, settings.start)

    @property
    def size(self) -> int:
        """Ids that occur; a vocabulary may have holes, so that this is the largest and one."""
        return len(self.word_starts)

    def id(self, role: str) -> int | None:
        """The id of the pad, bos, eos, mask … token, if there is one."""
        return self.tokenizer.special(role)

    def need(self, role: str, objective: str) -> int:
        token = self.tokenizer.special(role)
        if token is None:
            raise ValueError(f"{objective} needs a {role} token, and the tokenizer has none; set tokenizer.{role}")
        return token

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        plain = self.tokenizer.encode("a", special=False)
        framed = self.tokenizer.encode("a")
        before = next((n for n in range(len(framed)) if framed[n : n + len(plain)] == plain), 0)
        return framed[:before], framed[before + len(plain) :]

    @cached_property
    def special(self) -> NDArray[np.bool_]:
        out = np.zeros(self.size, dtype=bool)
        out[sorted(self.tokenizer.special_ids())] = True
        return out

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        return self.tokenizer.word_starts()

    @cached_property
    def sentinels(self) -> list[int]:
        return self.tokenizer.sentinels()

    @cached_property
    def full_stops(self) -> NDArray[np.bool_]:
        """Tokens that end a sentence."""
        out = np.zeros(self.size, dtype=bool)
        for token in range(self.size):
            text = self.tokenizer.backend.id_to_token(token) or ""
            out[token] = text.endswith((".", "!", "?", "。", "！", "？", "Ċ"))
        return out
