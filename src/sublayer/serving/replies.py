"""OpenAI's answers, whole and in chunks."""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data import Tokenizer
from ..generation.answer import Chance
from .job import Event


@dataclass
class Choice:
    """One answer, put together from its pieces."""

    text: str = ""
    chances: list[Chance] = field(default_factory=list)
    reason: str | None = None
    tokens: int = 0

    def add(self, event: Event) -> None:
        self.text += event.text
        self.chances += event.chances
        self.reason, self.tokens = event.reason, max(event.tokens, self.tokens)


class Reply:
    """The form of one endpoint's answers to one request."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, chat: bool, logprobs: bool) -> None:
        self.chat, self.logprobs, self.tokenizer = chat, logprobs, tokenizer
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        rows = []
        for index, choice in enumerate(choices):
            said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            rows.append(
                self._choice(index, choice.chances, choice.reason, said if self.chat else {"text": choice.text})
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": rows, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """A chat's first chunk says who speaks."""
        return self._chunk([self._choice(index, [], None, {"delta": {"role": "assistant", "content": ""}})])

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        said: dict[str, Any] = {"text": event.text}
        if self.chat:
            said = {"delta": {"content": event.text} if event.text else {}}
        return self._chunk([self._choice(index, event.chances, event.reason, said)])

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}

    def _choice(
        self, index: int, chances: Sequence[Chance], reason: str | None, said: dict[str, Any]
    ) -> dict[str, Any]:
        told = None
        if self.logprobs and chances:
            told = self._told_chat(chances) if self.chat else self._told(chances)
        return {"index": index, **said, "logprobs": told, "finish_reason": reason}

    def _told_chat(self, chances: Sequence[Chance]) -> dict[str, Any]:
        rows = [
            {**self._named(chance.token, chance.logprob), "top_logprobs": [self._named(*pair) for pair in chance.top]}
            for chance in chances
        ]
        return {"content": rows, "refusal": None}

    def _told(self, chances: Sequence[Chance]) -> dict[str, Any]:
        return {
            "tokens": [self._token(chance.token) for chance in chances],
            "token_logprobs": [chance.logprob for chance in chances],
            "top_logprobs": [
                {self._token(token): logprob for token, logprob in reversed(chance.top)} for chance in chances
            ],
            "text_offset": [chance.start for chance in chances],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        # A token that is part of a character has bytes, but this is not the place that knows which.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": None if "�" in text else [*text.encode()]}

    def _token(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def embeddings(model: str, vectors: Sequence[Sequence[float]], form: str, tokens: int) -> dict[str, Any]:
    def written(vector: Sequence[float]) -> str | list[float]:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if form == "base64" else [*vector]

    rows = [{"object": "embedding", "index": n, "embedding": written(vector)} for n, vector in enumerate(vectors)]
    return {
        "object": "list", "data": rows, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }  # fmt: skip
