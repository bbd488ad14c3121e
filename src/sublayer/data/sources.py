"""From where the rows are, through the tokenizer, to a store: files, a named data set, or a corpus made on the spot."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conversations import chat_template
from .counting import Counting
from .readers import DataError, Row, Skipped, find_files, fingerprint, read_dataset, read_rows
from .settings import DataSettings, TokenizerSettings
from .store import Store, Writer, cache_folder, cached, key_of
from .tasks import TASKS, Context, Stored, optional_columns
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary

BATCH = 1024  # rows given to the tokenizer at once; it works on them with all cores
Say = Callable[[str], None]


@dataclass
class Source:
    """Rows that can be read again, and a key that changes with their content."""

    name: str
    key: str
    rows: Callable[[], Iterator[Row]]
    skipped: Skipped


def open_source(settings: DataSettings, split: str) -> Source | None:
    """The rows of "train", "valid" or "test"; None where neither files nor a corpus are named for it."""
    if settings.split and split != "test":
        whole = open_source(dataclasses.replace(settings, split=0.0), "train")
        return None if whole is None else _part(whole, settings, split)
    where = getattr(settings, split)
    skipped = Skipped()
    if where is None:
        if settings.corpus is None or settings.train is not None:
            return None
        return _corpus(settings, split, skipped)
    task = TASKS[settings.objective]
    columns = {name: getattr(settings, name) for name in (*task.columns, *optional_columns(settings))}
    if isinstance(where, str) and where.startswith("datasets:"):
        name, _, config = where.removeprefix("datasets:").partition(":")
        part = {"valid": "validation"}.get(split, split)
        return Source(
            where, where,
            lambda: read_dataset(
                name, columns, part, config or None, on_error=settings.on_error, max_row_bytes=settings.max_row_bytes,
                skipped=_fresh(skipped),
            ),
            skipped,
        )  # fmt: skip
    if settings.objective == "classify-image":
        from .images import find_images

        images = find_images(where)
        if images is not None:
            return Source(str(where), key_of([(row.file, Path(row.file).stat().st_mtime_ns) for row in images]),
                          lambda: iter(images), skipped)  # fmt: skip
    files = find_files(where)
    documents = settings.documents if task.windows else "line"

    def rows() -> Iterator[Row]:
        return read_rows(
            files, columns, names=settings.names, documents=documents, on_error=settings.on_error,
            max_row_bytes=settings.max_row_bytes, skipped=_fresh(skipped),
        )  # fmt: skip

    name = where if isinstance(where, str) else ", ".join(where)
    return Source(name, fingerprint(files), rows, skipped)


def _part(source: Source, settings: DataSettings, split: str) -> Source:
    """The rows held out to validate with, or the others. A document that comes in pieces stays whole."""

    def rows() -> Iterator[Row]:
        number, held_out, empty = 0, False, True
        for row in source.rows():
            if not row.values.get("continued", False):
                number += 1
                held_out = _held_out(number, settings)
            if held_out == (split == "valid"):
                empty = False
                yield row
        if empty:
            raise DataError(f"{source.name}: data.split={settings.split} leaves no row for {split}; give data.valid")

    key = key_of(source.key, settings.split, settings.split_seed, split)
    return Source(f"{source.name} ({split} part)", key, rows, source.skipped)


def _held_out(number: int, settings: DataSettings) -> bool:
    """Drawn from the row's number alone, so that rows added to a file move no other."""
    drawn = hashlib.blake2b(f"{settings.split_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") < settings.split * 2**64


def _fresh(skipped: Skipped) -> Skipped:
    """Emptied: what is read again is counted again."""
    skipped.counts.clear()
    skipped.first.clear()
    return skipped


def _corpus(settings: DataSettings, split: str, skipped: Skipped) -> Source:
    from . import corpora

    kind, task = settings.corpus, TASKS[settings.objective]
    count = settings.corpus_size if split == "train" else min(2000, max(200, settings.corpus_size // 20))
    if kind == "stdlib":
        files = corpora.stdlib_files(split)
        return Source(
            f"Python's standard library ({split})", fingerprint(files),
            lambda: read_rows(files, ["text"], documents="file", on_error="skip", skipped=_fresh(skipped)), skipped,
        )  # fmt: skip
    made: dict[str, Callable[[], Iterable[Any]]] = {
        "cldr": lambda: corpora.cldr_pairs(count, split=split),
        "labelled": lambda: corpora.labelled_text(count, split=split),
        "tagged": lambda: corpora.tagged_text(count, split=split),
        "questions": lambda: corpora.questions(count, split=split),
        "digits": lambda: corpora.digits(split),
    }
    assert kind is not None

    def rows() -> Iterator[Row]:
        for number, made_row in enumerate(made[kind](), 1):
            values = (
                dict(zip(task.columns, made_row, strict=True))
                if isinstance(made_row, tuple)
                else {name: getattr(made_row, name) for name in task.columns}
            )
            yield Row(values, f"the {kind} corpus", number)

    package = "scikit-learn" if kind == "digits" else "babel"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"the {kind} corpus needs {package}: pip install 'sublayer[corpora]'") from None
    return Source(f"the {kind} corpus ({split})", key_of(kind, count, split, version), rows, skipped)


def open_tokenizer(source: Source, data: DataSettings, settings: TokenizerSettings, say: Say) -> Tokenizer:
    """The tokenizer a recipe names, or one trained on the training data and kept for the next run."""
    if settings.path is not None:
        return Tokenizer.load(Path(settings.path))
    folder = cache_folder(data.cache) / "tokenizers" / key_of(source.key, data.objective, dataclasses.asdict(settings))

    def build(temporary: Path) -> None:
        from .tokenizer_train import train_tokenizer

        say(f"training a {settings.kind} tokenizer on {source.name}")
        tokenizer = train_tokenizer(
            _texts(source, data), kind=settings.kind, vocab_size=settings.vocab_size, special=settings.special,
            template=settings.template, lowercase=settings.lowercase, digits=settings.digits, extra=settings.all_extra,
        )  # fmt: skip
        tokenizer.save(temporary)
        (temporary / "meta.json").write_text("{}", encoding="utf-8")

    return Tokenizer.load(cached(folder, build))


def _texts(source: Source, data: DataSettings) -> Iterator[str]:
    """What a tokenizer is trained on: the text columns of up to a million rows."""
    names = (*TASKS[data.objective].texts, *optional_columns(data))
    for row in itertools.islice(source.rows(), 1_000_000):
        for name in names:
            value = row.values[name] or ""
            yield value if isinstance(value, str) else " ".join(map(str, value))


def open_store(source: Source, context: Context, say: Say) -> Store:
    """The rows of a source as numbers: made now, or found from an earlier run with the same content and settings."""
    settings, task = context.settings, TASKS[context.settings.objective]
    vocabulary = context.vocabulary
    relevant = [settings.objective, settings.documents, settings.names, settings.on_error, settings.max_row_bytes]
    relevant += [(name, getattr(settings, name)) for name in (*task.columns, *optional_columns(settings))]
    words = None if vocabulary is None else [vocabulary.tokenizer.fingerprint(), vocabulary.frame]
    images = context.image_shape if settings.objective == "classify-image" else None
    labels = context.labels.names if context.labels.frozen else None
    prompts = settings.objective == "prompt-completion"
    relevant += [settings.between, settings.as_chat] if prompts else []
    by_template = settings.objective == "chat" or (prompts and settings.as_chat)
    chat = chat_template(context.words.tokenizer) if by_template else None
    key = key_of(source.key, relevant, words, images, labels, *([chat] if chat is not None else []))
    folder = cache_folder(settings.cache) / "data" / key
    store = Store(cached(folder, lambda temporary: _build(temporary, source, context, say)))
    if not context.labels.frozen:
        context.labels.__init__(store.info["labels"], frozen=True)  # type: ignore[misc]
    return store


def _build(folder: Path, source: Source, context: Context, say: Say) -> None:
    task = TASKS[context.settings.objective]
    size = 0 if context.vocabulary is None else context.vocabulary.size
    token = "uint16" if size <= 1 << 16 else "uint32"
    writer = Writer(folder, {name: token if kind == "token" else kind for name, kind in task.fields.items()})
    causal = context.settings.objective == "causal"
    before, after = _ends(context) if causal else ([], [])
    tokens = 0
    with Counting(f"tokenising {source.name}", say) as counting:
        for rows in _grouped(source.rows()):
            for row, stored in _encoded(rows, context, source):
                continued = bool(row.values.get("continued", False))
                if causal and not continued:
                    if len(writer):
                        writer.add({"text": after}, continued=True)
                    stored = {"text": [*before, *stored["text"]]}
                writer.add(stored, continued=continued)
                tokens += len(stored[task.measure])
            counting.update(len(writer), tokens)
    if not len(writer):
        raise DataError(f"{source.name} holds nothing to learn from: every row is empty")
    if causal:
        writer.add({"text": after}, continued=True)
    writer.finish({"labels": context.labels.names, "skipped": str(source.skipped), "tokens": tokens})
    if source.skipped.count and context.settings.train is not None:
        say(f"{source.name}: {source.skipped}")


def _encoded(rows: list[Row], context: Context, source: Source) -> Iterator[tuple[Row, Stored]]:
    """Rows with their numbers; one that cannot be used is left out and counted, where the settings say so."""
    encode = TASKS[context.settings.objective].encode
    try:
        yield from zip(rows, encode(rows, context), strict=True)
    except DataError:
        if context.settings.on_error == "stop":
            raise
        for row in rows:
            try:
                yield row, encode([row], context)[0]
            except DataError:
                source.skipped.add("unusable", row.where())


def _ends(context: Context) -> tuple[list[int], list[int]]:
    """What begins and ends a document of causal text: bos where there is one, and eos."""
    vocabulary: Vocabulary = context.words
    bos, eos = vocabulary.id("bos"), vocabulary.id("eos")
    return [] if bos is None else [bos], [] if eos is None else [eos]


def _grouped(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while group := list(itertools.islice(rows, BATCH)):
        yield group
