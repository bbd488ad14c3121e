"""The text of an answer while its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..data import Tokenizer

WINDOW, OVERLAP = (
    256,
    32,
)  # tokens decoded again for each new one at most, and kept as context when older ones are let go


@dataclass(frozen=True)
class Chance:
    """How likely a token was, beside the likeliest ones; `start` is where its text begins in the answer."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    start: int = 0


class Text:
    """All tokens so far as text. A token's text depends on those before it, so a stretch is decoded together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.before, self.context = "", ""  # the text of tokens let go, and its end, which the stretch begins with

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.before + self.tokenizer.decode(self.ids)[len(self.context) :]
        if len(self.ids) >= WINDOW and self.whole(text):
            context = self.tokenizer.decode(self.ids[-OVERLAP:])
            rest = context.lstrip("�")  # it may begin within a character
            if rest and text.endswith(rest):
                self.ids, self.before, self.context = self.ids[-OVERLAP:], text, context
        return text

    def whole(self, text: str) -> bool:
        """Whether the text ends with a character; its bytes may come in several tokens."""
        return not text.endswith("�") and not self.tokenizer.is_byte(self.ids[-1])


class Answer:
    """Gives out text as it becomes certain: never half a character, and nothing of a string that ends the answer."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.source = Text(tokenizer)
        self.stop = tuple(stop)
        self.text = ""
        self.shown = 0
        self.stopped = False
        self._chances: list[tuple[Chance, int]] = []  # of tokens not given out yet, with where their text ends

    def add(self, token: int, chance: Chance | None = None) -> tuple[str, list[Chance]]:
        """What one more token adds that can be shown; `stopped` tells whether a stop string has come."""
        start = len(self.text)
        self.text = self.source.add(token)
        if chance is not None:
            start = min(start, len(self.text))
            self._chances.append((Chance(chance.token, chance.logprob, chance.top, start), len(self.text)))
        if not self.source.whole(self.text):
            return "", []
        return self._show(last=False)

    def finish(self) -> tuple[str, list[Chance]]:
        """What was held back, when no more tokens come."""
        return ("", []) if self.stopped else self._show(last=True)

    def _show(self, last: bool) -> tuple[str, list[Chance]]:
        # The one that is complete first ends the answer, whatever pieces the text came in.
        found = [(place + len(word), place) for word in self.stop if (place := self.text.find(word, self.shown)) >= 0]
        self.stopped = bool(found)
        end = min(found)[1] if found else len(self.text) - (0 if last else self._held())
        piece, self.shown = self.text[self.shown : end], end
        ready = [chance for chance, stands in self._chances if stands <= end]
        self._chances = [pair for pair in self._chances if pair[1] > end]
        return piece, ready

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        rest = self.text[self.shown :]
        lengths = (n for word in self.stop for n in range(min(len(word) - 1, len(rest)), 0, -1))
        return max((n for n in lengths if any(word.startswith(rest[-n:]) for word in self.stop)), default=0)
