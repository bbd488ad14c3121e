"""Corpora made on the spot, so that every recipe runs without data to fetch.

Most are made of dates, times, numbers, prices, units and durations, in English and in translation as CLDR writes them.
They never end, are exact, follow from the seed, and are split by value: a date or number that is held out is never seen
in training, in any wording or language.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy

from ..config import unknown

if TYPE_CHECKING:
    from .corpora_cldr import Drawn

KINDS = ("date", "time", "number", "price", "unit", "duration")
LANGUAGES = ("de", "zh")
SPLITS = ("train", "valid", "test")
# Enough for the whole standard library of today, and a bound for an unusual installation.
MAX_STDLIB_FILES = 1000
# Tests hold broken files on purpose, and packages that were installed later are not the standard library.
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, slots=True)
class Pair:
    """English and its translation. The source begins with the language asked for: `<de> ` or `<zh> `."""

    source: str
    target: str
    kind: str


@dataclass(frozen=True, slots=True)
class LabelledText:
    text: str
    label: str


@dataclass(frozen=True, slots=True)
class TaggedText:
    """Words and their tags: B-date begins a date, I-date goes on with it, O is none of ours."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is context[start:end]."""

    question: str
    context: str
    answer: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.answer)


def split_of(value: str) -> str:
    """Nine tenths of all values are for training, one in twenty each for validation and test, by a hash."""
    bucket = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def cldr_pairs(
    count: int,
    seed: int = 0,
    split: str = "train",
    languages: Sequence[str] = LANGUAGES,
    kinds: Sequence[str] = KINDS,
) -> Iterator[Pair]:
    """English into German and Chinese. The same source always has the same target.

    CLDR writes some spaces as no-break spaces; here they are plain ones, which people can type and compare.
    """
    for language in languages:
        if language not in LANGUAGES:
            raise ValueError(unknown("language", language, LANGUAGES))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(unknown("kind", kind, KINDS))
    if not languages or not kinds:
        raise ValueError("cldr_pairs needs at least one language and one kind")
    return _pairs(_draws(count, f"pairs {seed}", split, kinds), tuple(languages), Random(f"languages {split} {seed}"))


def _pairs(draws: Iterator[tuple[str, Drawn]], languages: tuple[str, ...], rng: Random) -> Iterator[Pair]:
    for kind, drawn in draws:
        language = rng.choice(languages)
        yield Pair(f"<{language}> {_write(drawn, 'en')}", _write(drawn, language), kind)


def labelled_text(count: int, seed: int = 0, split: str = "train") -> Iterator[LabelledText]:
    """English texts, each labelled with its kind."""
    draws = _draws(count, f"labels {seed}", split, KINDS)
    return (LabelledText(_write(drawn, "en"), kind) for kind, drawn in draws)


# A sentence about a thing, and what to ask of each value in it.
SENTENCES = (
    (
        ("concert", "course", "dinner", "meeting", "tour", "workshop"),
        "The {thing} ({date}, {time}) costs {price}.",
        {
            "date": "On what date is the {thing}?",
            "time": "At what time is the {thing}?",
            "price": "How much does the {thing} cost?",
        },
    ),
    (
        ("engine", "oven", "pump", "sensor", "tank", "turbine"),
        "The {thing} shows {unit}; last check: {duration}; change: {number}.",
        {
            "unit": "What does the {thing} show?",
            "duration": "What is known of the last check of the {thing}?",
            "number": "What is the change of the {thing}?",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Sentence:
    """Pieces of text with their kinds, empty for the words between values; and a question for each kind."""

    pieces: list[tuple[str, str]]
    questions: dict[str, str]


def tagged_text(count: int, seed: int = 0, split: str = "train") -> Iterator[TaggedText]:
    """Sentences cut into words, whose dates, times, prices … are tagged."""
    return map(_tagged, _sentences(count, f"tags {seed}", split))


def _tagged(sentence: _Sentence) -> TaggedText:
    words: list[str] = []
    tags: list[str] = []
    for text, kind in sentence.pieces:
        found = text.split() if kind else re.findall(r"\w+|[^\w\s]", text)
        words += found
        tags += [f"{'I' if index else 'B'}-{kind}" if kind else "O" for index in range(len(found))]
    return TaggedText(tuple(words), tuple(tags))


def questions(count: int, seed: int = 0, split: str = "train") -> Iterator[Question]:
    """A question on one of two sentences about different things, answered by a span of the text."""
    rng = Random(f"questions {split} {seed}")
    sentences = _sentences(2 * count, f"questions {seed}", split)
    return (_question(first, second, rng) for first, second in zip(sentences, sentences, strict=True))


def _question(first: _Sentence, second: _Sentence, rng: Random) -> Question:
    before, asked = rng.choice((([], first), ([*first.pieces, (" ", "")], second)))
    kind, question = rng.choice(tuple(asked.questions.items()))
    place = [slot for _, slot in asked.pieces].index(kind)
    start = sum(len(text) for text, _ in [*before, *asked.pieces[:place]])
    context = "".join(text for text, _ in [*first.pieces, (" ", ""), *second.pieces])
    return Question(question, context, asked.pieces[place][0], start)


def _sentences(count: int, seed: str, split: str) -> Iterator[_Sentence]:
    """No two in a row are about the same thing, so that a question on a pair of them has one answer."""
    values = {kind: _draws(count, f"{seed} {kind}", split, (kind,)) for kind in KINDS}
    rng = Random(f"{seed} {split}")

    def sentences() -> Iterator[_Sentence]:
        last = ""
        for _ in range(count):
            things, template, asked = rng.choice(SENTENCES)
            thing = last = rng.choice([thing for thing in things if thing != last])
            pieces = []
            for part in re.split(r"({\w+})", template.replace("{thing}", thing)):
                kind = part.strip("{}")
                pieces.append((_write(next(values[kind])[1], "en"), kind) if kind in KINDS else (part, ""))
            yield _Sentence(pieces, {kind: question.replace("{thing}", thing) for kind, question in asked.items()})

    return sentences()


def _draws(count: int, seed: str, split: str, kinds: Sequence[str]) -> Iterator[tuple[str, Drawn]]:
    """Values of a split, drawn until one belongs to it."""
    if split not in SPLITS:
        raise ValueError(unknown("split", split, SPLITS))
    if count < 0:
        raise ValueError("count is below zero; expected how many to make")
    try:
        from .corpora_cldr import DRAW
    except ModuleNotFoundError:
        raise ValueError("this corpus needs babel; install it with pip install 'sublayer[corpora]'") from None

    def draws() -> Iterator[tuple[str, Drawn]]:
        rng = Random(f"{seed} {split}")
        for _ in range(count):
            kind = rng.choice(kinds)
            drawn = DRAW[kind](rng)
            while split_of(drawn.value) != split:
                drawn = DRAW[kind](rng)
            yield kind, drawn

    return draws()


def _write(drawn: Drawn, language: str) -> str:
    return drawn.write(language).replace("\u00a0", " ").replace("\u202f", " ")


def stdlib_files(split: str = "train") -> list[Path]:
    """The source of Python's standard library, as a text that every installation has; split by a hash of the path."""
    if split not in SPLITS:
        raise ValueError(unknown("split", split, SPLITS))
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(f"{root} holds no .py files; this Python comes without the source of its library")
    return [root / path for path in sorted(found)[:MAX_STDLIB_FILES] if split_of(path.as_posix()) == split]


def digits(split: str = "train") -> list[tuple[numpy.ndarray[Any, numpy.dtype[numpy.uint8]], int]]:
    """scikit-learn's 1,797 handwritten digits as images (1, 8, 8) of 0 to 255; a tenth each to validate and to test."""
    if split not in SPLITS:
        raise ValueError(unknown("split", split, SPLITS))
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("the digits need scikit-learn; install it with pip install 'sublayer[corpora]'") from None
    images, labels = load_digits(return_X_y=True)
    pixels = numpy.rint(images.reshape(-1, 1, 8, 8) * (255 / 16)).astype(numpy.uint8)
    # RandomState, since NumPy promises never to change what it draws.
    order = numpy.random.RandomState(0).permutation(len(labels))
    held = len(labels) // 10
    chosen = {"train": order[2 * held :], "valid": order[:held], "test": order[held : 2 * held]}[split]
    return [(pixels[index], int(labels[index])) for index in chosen]
