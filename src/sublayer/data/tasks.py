"""How rows become stored numbers, and stored numbers become examples: one entry for each objective."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import objectives
from .objectives import Example
from .readers import DataError, Row
from .settings import DataSettings
from .vocabulary import Vocabulary

Stored = dict[str, Any]  # field -> whole numbers
Random = Callable[[], np.random.Generator]


@dataclass
class Labels:
    """Names of labels in the order they were first seen; `frozen` when they come from the training data."""

    names: list[str] = field(default_factory=list)
    frozen: bool = False
    arranged: tuple[str, ...] = ()  # the order of a model that has its labels already

    def index(self, value: Any, row: Row) -> int:
        if value is None or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{row.where()}: the label is missing; give every row one")
        name = str(value)
        if name not in self._places:
            if self.frozen:
                known = ", ".join(sorted(self.names)[:8])
                raise DataError(f"{row.where()}: label {name!r} never occurs in the training data (known: {known})")
            self._places[name] = len(self.names)
            self.names.append(name)
        return self._places[name]

    def __post_init__(self) -> None:
        self._places = {name: n for n, name in enumerate(self.names)}

    def sorted(self) -> list[str]:
        """As the model numbers them: its own order, else 0, 1, 2 … 10 where they are numbers, else the alphabet."""
        if self.arranged:
            return list(self.arranged)
        return sorted(self.names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))

    def order(self) -> NDArray[np.int64]:
        """(labels,): from the stored number to the model's."""
        places = {name: n for n, name in enumerate(self.sorted())}
        return np.array([places[name] for name in self.names], dtype=np.int64)


@dataclass(frozen=True)
class Context:
    """All that encoding and making examples depend on."""

    vocabulary: Vocabulary | None
    settings: DataSettings
    labels: Labels
    image_shape: tuple[int, int, int] = (0, 0, 0)  # channels, height and width of the pictures the model reads

    @property
    def words(self) -> Vocabulary:
        assert self.vocabulary is not None
        return self.vocabulary


@dataclass(frozen=True)
class Task:
    head: str  # of the model
    shapes: tuple[str, ...]
    columns: tuple[str, ...]  # keys of DataSettings that name the columns
    fields: dict[str, str]  # stored fields: "token" or a numpy type
    encode: Callable[[Sequence[Row], Context], list[Stored]]
    example: Callable[[Stored, Context, Random], Example]
    measure: str  # the field whose length is the example's
    windows: bool = False  # the rows are documents, cut to the length of an example
    texts: tuple[str, ...] = ("text",)  # the columns a tokenizer is trained on


OPTIONAL = {"classify-sequence": "pair", "prompt-completion": "input", "sequence-to-sequence": "input"}


def optional_columns(settings: DataSettings) -> tuple[str, ...]:
    """Keys of DataSettings that name columns an objective can also use, where they are set."""
    name = OPTIONAL.get(settings.objective)
    return () if name is None or getattr(settings, name) is None else (name,)


def _asked(row: Row, name: str) -> str:
    """The prompt, and what it is about under it."""
    prompt, below = row.values[name], row.values.get("input")
    return f"{prompt}\n\n{below}" if below and not below.isspace() else str(prompt)


def _encode_pairs(rows: Sequence[Row], context: Context) -> list[Stored]:
    tokenizer = context.words.tokenizer
    sources = tokenizer.encode_batch([_asked(row, "source") for row in rows])
    targets = tokenizer.encode_batch([row.values["target"] for row in rows], special=False)
    return [{"source": s, "target": t} for s, t in zip(sources, targets, strict=True)]


def _pair(stored: Stored, context: Context, random: Random) -> Example:
    words = context.words
    return objectives.sequence_to_sequence(
        stored["source"], stored["target"], start=words.need(words.start_role, "sequence-to-sequence"),
        eos=words.need("eos", "sequence-to-sequence"), max_length=context.settings.max_length,
    )  # fmt: skip


def _encode_text(rows: Sequence[Row], context: Context) -> list[Stored]:
    tokenizer = context.words.tokenizer
    return [{"text": ids} for ids in tokenizer.encode_batch([row.values["text"] for row in rows], special=False)]


def _causal(stored: Stored, context: Context, random: Random) -> Example:
    return objectives.causal(stored["text"])


def _masked(stored: Stored, context: Context, random: Random) -> Example:
    words, settings = context.words, context.settings
    before, after = words.frame
    return objectives.masked(
        np.concatenate([before, stored["text"], after]).astype(np.int64), random(),
        mask_id=words.need("mask", "masked"), vocab_size=words.size, special=words.special,
        probability=settings.mask_probability, word_starts=words.word_starts if settings.whole_words else None,
    )  # fmt: skip


def _span_corruption(stored: Stored, context: Context, random: Random) -> Example:
    words, settings = context.words, context.settings
    if not words.sentinels:
        raise ValueError("span-corruption needs sentinel tokens <extra_id_0> …; set tokenizer.sentinels, 100 in T5")
    return objectives.span_corruption(
        stored["text"], random(), sentinels=words.sentinels, start=words.need(words.start_role, "span-corruption"),
        eos=words.need("eos", "span-corruption"), density=settings.noise_density, mean_span=settings.mean_span,
    )  # fmt: skip


def _denoising(stored: Stored, context: Context, random: Random) -> Example:
    words, settings = context.words, context.settings
    return objectives.denoising(
        stored["text"], random(), mask_id=words.need("mask", "denoising"),
        start=words.need(words.start_role, "denoising"), eos=words.need("eos", "denoising"), bos=words.id("bos"),
        ratio=settings.noise_ratio, mean_span=settings.mean_span,
        full_stops=words.full_stops if settings.permute_sentences else None,
    )  # fmt: skip


def _encode_labelled(rows: Sequence[Row], context: Context) -> list[Stored]:
    tokenizer, labels = context.words.tokenizer, context.labels
    numbers = [labels.index(row.values["label"], row) for row in rows]
    if context.settings.pair is None:
        texts = tokenizer.encode_batch([row.values["text"] for row in rows])
        encoded = [(ids, [0] * len(ids)) for ids in texts]
    else:
        encoded = tokenizer.encode_pairs([(row.values["text"], row.values["pair"]) for row in rows])
    return [{"text": ids, "types": kinds, "label": [n]} for (ids, kinds), n in zip(encoded, numbers, strict=True)]


def _labelled(stored: Stored, context: Context, random: Random) -> Example:
    return objectives.label_sequence(
        stored["text"], int(context.labels.order()[stored["label"][0]]), num_labels=len(context.labels.sorted()),
        token_types=stored["types"] if context.settings.pair else None, max_length=context.settings.max_length,
    )  # fmt: skip


def _list(value: Any, row: Row, name: str) -> list[Any]:
    if isinstance(value, str):  # a column of a TSV or CSV file: words between spaces, or a JSON list
        try:
            value = json.loads(value) if value.startswith("[") else value.split()
        except json.JSONDecodeError:
            value = value.split()
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{row.where()}: {name} is {value!r}; expected a list, or words between spaces")
    return list(value)


def _encode_tagged(rows: Sequence[Row], context: Context) -> list[Stored]:
    words = [[str(word) for word in _list(row.values["words"], row, "words")] for row in rows]
    tags = [[context.labels.index(tag, row) for tag in _list(row.values["tags"], row, "tags")] for row in rows]
    for row, one, other in zip(rows, words, tags, strict=True):
        if len(one) != len(other):
            raise DataError(f"{row.where()}: {len(one)} words and {len(other)} tags; every word needs one tag")
    encoded = context.words.tokenizer.encode_words(words)
    return [{"text": ids, "words": owners, "tags": t} for (ids, owners), t in zip(encoded, tags, strict=True)]


def _tagged(stored: Stored, context: Context, random: Random) -> Example:
    tags = context.labels.order()[stored["tags"]]
    return objectives.label_tokens(stored["text"], stored["words"], tags, max_length=context.settings.max_length)


def _answer(row: Row) -> tuple[int, int]:
    """First and last character + 1 of the answer; (-1, -1) where the context holds none, as SQuAD 2 allows."""
    answer, context = row.values["answer"], row.values["context"]
    if isinstance(answer, dict):
        texts, starts = list(answer.get("text", ())), list(answer.get("answer_start", ()))
        if not texts:
            return -1, -1
        if not starts or not isinstance(starts[0], int) or context[starts[0] : starts[0] + len(texts[0])] != texts[0]:
            raise DataError(f"{row.where()}: the answer {texts[0]!r} does not stand where answer_start says")
        return starts[0], starts[0] + len(texts[0])
    if not isinstance(answer, str):
        raise DataError(f"{row.where()}: the answer is {answer!r}; expected a text of the context")
    start = context.find(answer)
    if start < 0 or not answer:
        raise DataError(f"{row.where()}: the answer {answer!r} does not occur in the context")
    return start, start + len(answer)


def _encode_questions(rows: Sequence[Row], context: Context) -> list[Stored]:
    answers = [_answer(row) for row in rows]
    encoded = context.words.tokenizer.encode_contexts([(r.values["question"], r.values["context"]) for r in rows])
    return [
        {"text": ids, "types": kinds, "offsets": np.asarray(offsets).reshape(-1), "answer": answer}
        for (ids, kinds, offsets), answer in zip(encoded, answers, strict=True)
    ]


def _question(stored: Stored, context: Context, random: Random) -> Example:
    start, end = (int(n) for n in stored["answer"])
    return objectives.answer_span(
        stored["text"], stored["types"], stored["offsets"].reshape(-1, 2), start, end,
        max_length=context.settings.max_length,
    )  # fmt: skip


def _encode_images(rows: Sequence[Row], context: Context) -> list[Stored]:
    from .images import read_image

    return [
        {
            "pixels": read_image(row, context.image_shape).reshape(-1),
            "label": [context.labels.index(row.values["label"], row)],
        }
        for row in rows
    ]


def _image(stored: Stored, context: Context, random: Random) -> Example:
    settings = context.settings
    return objectives.label_image(
        stored["pixels"].reshape(context.image_shape), int(context.labels.order()[stored["label"][0]]),
        num_labels=len(context.labels.sorted()), flip=settings.flip, crop=settings.crop,
        rng=random() if settings.flip or settings.crop else None,
    )  # fmt: skip


def _encode_prompts(rows: Sequence[Row], context: Context) -> list[Stored]:
    """A prompt as generation reads it, then the completion and the token that ends it, which are learned."""
    if context.settings.as_chat:
        return _encode_chats([_as_chat(row) for row in rows], context)
    words = context.words
    after, eos = len(words.frame[1]), words.id("eos")
    prompts = words.tokenizer.encode_batch([_asked(row, "prompt") + context.settings.between for row in rows])
    answers = words.tokenizer.encode_batch([row.values["completion"] for row in rows], special=False)
    out = []
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt = prompt[: len(prompt) - after]
        answer = answer if eos is None else [*answer, eos]
        out.append({"text": [*prompt, *answer], "learn": [0] * len(prompt) + [1] * len(answer)})
    return out


def _as_chat(row: Row) -> Row:
    said = {"user": _asked(row, "prompt"), "assistant": row.values["completion"]}
    return Row({"messages": [{"role": role, "content": text} for role, text in said.items()]}, row.file, row.number)


def _encode_chats(rows: Sequence[Row], context: Context) -> list[Stored]:
    from .conversations import encode_chats

    return [{"text": ids, "learn": learn} for ids, learn in encode_chats(rows, context.words.tokenizer)]


def _learned(stored: Stored, context: Context, random: Random) -> Example:
    return objectives.learned(stored["text"], stored["learn"], max_length=context.settings.max_length)


_TEXT = dict(columns=("text",), fields={"text": "token"}, encode=_encode_text, measure="text", windows=True)
TASKS: dict[str, Task] = {
    "sequence-to-sequence": Task(
        "lm", ("encoder-decoder",), ("source", "target"), {"source": "token", "target": "token"}, _encode_pairs, _pair,
        "source", texts=("source", "target"),
    ),
    "causal": Task("lm", ("decoder",), example=_causal, **_TEXT),  # type: ignore[arg-type]
    "masked": Task("mlm", ("encoder",), example=_masked, **_TEXT),  # type: ignore[arg-type]
    "span-corruption": Task("lm", ("encoder-decoder",), example=_span_corruption, **_TEXT),  # type: ignore[arg-type]
    "denoising": Task("lm", ("encoder-decoder",), example=_denoising, **_TEXT),  # type: ignore[arg-type]
    "classify-sequence": Task(
        "classifier", ("encoder",), ("text", "label"), {"text": "token", "types": "uint8", "label": "int32"},
        _encode_labelled, _labelled, "text",
    ),
    "classify-tokens": Task(
        "token-classifier", ("encoder",), ("words", "tags"), {"text": "token", "words": "int32", "tags": "int32"},
        _encode_tagged, _tagged, "text", texts=("words",),
    ),
    "find-span": Task(
        "span", ("encoder",), ("question", "context", "answer"),
        {"text": "token", "types": "uint8", "offsets": "int32", "answer": "int32"}, _encode_questions, _question,
        "text", texts=("question", "context"),
    ),
    "classify-image": Task(
        "classifier", ("encoder",), ("image", "label"), {"pixels": "uint8", "label": "int32"}, _encode_images, _image,
        "pixels", texts=(),
    ),
    "prompt-completion": Task(
        "lm", ("decoder",), ("prompt", "completion"), {"text": "token", "learn": "uint8"}, _encode_prompts, _learned,
        "text", texts=("prompt", "completion"),
    ),
    "chat": Task(
        "lm", ("decoder",), ("messages",), {"text": "token", "learn": "uint8"}, _encode_chats, _learned, "text",
        texts=("messages",),
    ),
}  # fmt: skip
