"""Conversations to learn from: the text of each by the checkpoint's template, and which tokens the assistant said.

The loss is on what the assistant says, and on the token that ends its turn. Where it stands in the text is told by the
template, if it has {% generation %} around it; else by rendering the conversation up to each turn, once with the
beginning of an answer and once with the answer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chat import check_messages, find_template, render_all, special_tokens
from .readers import DataError, Row
from .tokenizer import Tokenizer

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
AT_ONCE = 256  # texts rendered by one process

SHAREGPT = {"human": "user", "gpt": "assistant"}  # roles there, and everywhere else
Span = tuple[int, int]  # characters of the text
Encoded = tuple[list[int], NDArray[np.uint8]]


def encode_chats(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Encoded]:
    """The ids of each conversation, and for each id 1 where it is learned."""
    template, special = chat_template(tokenizer), special_tokens(tokenizer.settings)
    chats = [_messages(row) for row in rows]
    by = _marked if GENERATION.search(template) else _by_turns
    texts = by(template, special, rows, chats)
    encodings = tokenizer.backend.encode_batch([text for text, _ in texts], add_special_tokens=False)
    return [
        (encoding.ids, _learned(encoding.offsets, spans)) for encoding, (_, spans) in zip(encodings, texts, strict=True)
    ]


def chat_template(tokenizer: Tokenizer) -> str:
    template = find_template(tokenizer.settings, tokenizer.folder)
    if template is None:
        raise ValueError(
            f"{tokenizer.folder or 'the model'} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); put one there, or learn from columns prompt and completion as they are"
        )
    return template


def _messages(row: Row) -> list[Mapping[str, Any]]:
    value = row.values["messages"]
    if isinstance(value, str):  # a column of a table
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{row.where()}: messages is no JSON list") from None
    if isinstance(value, list | tuple):
        value = [_message(one) for one in value]
    try:
        check_messages(value)
    except ValueError as error:
        raise DataError(f"{row.where()}: {error}") from None
    # Parquet has every key in every message, with nothing in those it lacks.
    messages: list[Mapping[str, Any]] = [
        {key: one for key, one in message.items() if one is not None} for message in value
    ]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{row.where()}: the chat has no assistant turn; there is nothing to learn from it")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{row.where()}: the chat begins with the assistant; a turn to answer must come before")
    return messages


def _message(given: Any) -> Any:
    """ShareGPT's {"from": "human", "value": …} in the words that templates know; anything else as it is."""
    if not isinstance(given, Mapping) or given.get("role") is not None or not isinstance(given.get("from"), str):
        return given
    rest = {key: value for key, value in given.items() if key not in ("from", "value", "role", "content")}
    return {"role": SHAREGPT.get(given["from"], given["from"]), "content": given.get("value"), **rest}


def _render(
    template: str, special: Mapping[str, str], wanted: Sequence[tuple[Row, dict[str, Any]]], mark: str = ""
) -> list[str]:
    out: list[str] = []
    for start in range(0, len(wanted), AT_ONCE):
        part = wanted[start : start + AT_ONCE]
        answers = render_all(template, [values for _, values in part], special=special, mark=mark)
        for (row, _), answer in zip(part, answers, strict=True):
            if isinstance(answer, ValueError):
                raise DataError(f"{row.where()}: {answer}")
            out.append(answer)
    return out


def _marked(
    template: str, special: Mapping[str, str], rows: Sequence[Row], chats: Sequence[list[Mapping[str, Any]]]
) -> list[tuple[str, list[Span]]]:
    """By {% generation %}: what stands between two marks that no text can hold."""
    mark = f"\x02{secrets.token_hex(8)}\x03"
    values = [(row, {"messages": chat, "add_generation_prompt": False}) for row, chat in zip(rows, chats, strict=True)]
    out = []
    for row, rendered in zip(rows, _render(template, special, values, mark), strict=True):
        text, spans = "", []
        for number, piece in enumerate(rendered.split(mark)):
            if number % 2:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        if not any(start < end for start, end in spans):
            raise DataError(f"{row.where()}: the chat template has nothing between {{% generation %}} for this chat")
        out.append((text, spans))
    return out


def _by_turns(
    template: str, special: Mapping[str, str], rows: Sequence[Row], chats: Sequence[list[Mapping[str, Any]]]
) -> list[tuple[str, list[Span]]]:
    """By rendering up to each turn: what the turn adds to the beginning of an answer is the answer."""
    wanted: list[tuple[Row, dict[str, Any]]] = []
    turns: list[int] = []
    for row, chat in zip(rows, chats, strict=True):
        places = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
        for place in places:
            wanted.append((row, {"messages": chat[:place], "add_generation_prompt": True}))
            wanted.append((row, {"messages": chat[: place + 1], "add_generation_prompt": False}))
        wanted.append((row, {"messages": chat, "add_generation_prompt": False}))
        turns.append(len(places))
    texts = iter(_render(template, special, wanted))
    out = []
    for row, count in zip(rows, turns, strict=True):
        edges = [(next(texts), next(texts)) for _ in range(count)]
        whole = next(texts)
        if not all(after.startswith(before) and whole.startswith(after) for before, after in edges):
            raise DataError(
                f"{row.where()}: the chat template changes earlier turns as a chat goes on, so that the assistant's "
                "words cannot be found; put {% generation %} and {% endgeneration %} around them in the template"
            )
        # What follows the end of a turn is never generated, and so is not to be learned.
        out.append((whole, [(len(before), len(after.rstrip())) for before, after in edges]))
    return out


def _learned(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.uint8]:
    """1 from the first token that holds a character of a span to the last. Tokens of spaces may have empty places."""
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    out = np.zeros(len(places), dtype=np.uint8)
    for start, end in spans:
        inside = np.flatnonzero((places[:, 0] < end) & (places[:, 1] > start) & (places[:, 1] > places[:, 0]))
        if inside.size:
            out[inside[0] : inside[-1] + 1] = 1
    return out
