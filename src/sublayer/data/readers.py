"""Rows from files: plain text, TSV, CSV, JSONL and Parquet, each plain, gzip or zstd, read as a stream.

What is wrong with a file is told in one line, with the file and the row.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import unknown
from .formats import (
    BUFFER,
    EMPTY,
    PACKINGS,
    TEXT_COLUMNS,
    Bad,
    Columns,
    DataError,
    Entry,
    Request,
    first_line,
    in_one_line,
    make_request,
    opened,
    package,
    read_jsonl,
    read_parquet,
    read_text,
)
from .tables import read_csv, read_tsv

__all__ = [
    "ENDINGS",
    "TEXT_COLUMNS",
    "DataError",
    "Row",
    "Skipped",
    "find_files",
    "fingerprint",
    "read_dataset",
    "read_rows",
]

READERS = {"text": read_text, "tsv": read_tsv, "csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}
ENDINGS = dict.fromkeys((".txt", ".text", ".md", ".rst", ".py", ".log"), "text") | {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
ON_ERROR = ("stop", "skip")
MAX_ROW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Row:
    values: dict[str, Any]
    file: str
    number: int  # of the line it begins at, or of the row in Parquet; the first is 1

    def where(self) -> str:
        return _where(self.file, self.number)


def _where(file: str, number: int) -> str:
    return f"{file}, row {number}"


@dataclass
class Skipped:
    """How many rows were left out, and where the first one was, for each reason."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        parts = [f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.items()]
        return f"skipped {', '.join(parts) or 'nothing'}"


# Which files


def find_files(where: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that a name stands for: a file, a glob, a folder with all below it, or a list of these.

    Matches are sorted, hidden files are left out, and a file that is named twice is read once. A file of unknown kind
    is an error even inside a folder: to leave it out in silence might be to leave out the data.
    """
    places = [where] if isinstance(where, str | Path) else list(where)
    if not places or not all(str(place) for place in places):
        raise DataError("no file was named; give a file, a glob, a folder, or a list of these")
    files = list(dict.fromkeys(path for place in places for path in _expand(os.path.expanduser(place))))
    for path in files:
        kind_of(path)
    return files


def _expand(place: str | Path) -> list[Path]:
    if os.path.isdir(place):
        found = list(_below(Path(place)))
        if not found:
            raise DataError(f"{place} is an empty folder; expected files in it")
    else:
        matches = [place] if os.path.lexists(place) else glob.glob(str(place), recursive=True)
        found = [Path(match) for match in matches if not os.path.isdir(match)]
        if not found:
            raise DataError(f"{place} matches no file; check the name")
    for path in found:
        if not path.is_file():
            raise DataError(f"{path} is no file that can be read; it is a broken link or a device")
    return sorted(found)


def _below(place: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def kind_of(path: Path) -> str:
    name = path.name.lower()
    ending = os.path.splitext(os.path.splitext(name)[0] if name.endswith(tuple(PACKINGS)) else name)[1]
    if ending not in ENDINGS:
        known = f"{', '.join(ENDINGS)}, each also with {' or '.join(PACKINGS)}"
        raise DataError(f"{path} has an unknown ending; rename it, or give a glob that leaves it out (known: {known})")
    return ENDINGS[ending]


def fingerprint(files: Sequence[Path], progress: Callable[[int], None] | None = None) -> str:
    """A hash of what the files hold and of how it is read, in order, whatever they are called.

    `progress` is told the bytes of each block as it is read.
    """
    whole = hashlib.blake2b(digest_size=16)
    for path in map(Path, files):
        part, before = hashlib.blake2b(), _state(path)
        with in_one_line(path), open(path, "rb") as stream:
            while block := stream.read(BUFFER):
                part.update(block)
                if progress is not None:
                    progress(len(block))
        _check_unchanged(path, before)
        whole.update(kind_of(path).encode() + b"\0" + part.digest())  # a digest each, so that moved boundaries show
    return whole.hexdigest()


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _check_unchanged(path: Path, before: tuple[int, int] | None) -> None:
    if _state(path) != before:
        raise DataError(f"{path} changed while it was read; run again when it is complete") from None


# Their rows


def read_rows(
    files: Sequence[Path],
    columns: Columns,
    *,
    names: Sequence[str] | None = None,
    documents: str = "line",
    on_error: str = "stop",
    max_row_bytes: int = MAX_ROW_BYTES,
    skipped: Skipped | None = None,
    text: Sequence[str] | None = None,
) -> Iterator[Row]:
    """The rows of the files, with the columns asked for: names, or a mapping from the wanted name to that in the file.

    The first row of a table is its header if it holds every column. If not, `names` says what the columns are, by
    position; without it the last columns are taken, in order. `documents` says what a row of plain text is: a line, a
    paragraph, or the whole file, which comes in pieces, with a value "continued" that is True for all but the first.
    `text` names the columns that must hold text, by default those of TEXT_COLUMNS. Rows without text are left out and
    counted in `skipped`; so are bad rows if `on_error` is "skip", else the first of them is a `DataError`.
    """
    request = make_request(columns, names, documents, max_row_bytes, text)
    _check_on_error(on_error)
    if not files:
        raise DataError("no file was named; find_files gives them")
    return _rows([Path(file) for file in files], request, on_error, Skipped() if skipped is None else skipped)


def _check_on_error(on_error: str) -> None:
    if on_error not in ON_ERROR:
        raise DataError(unknown("on_error", on_error, ON_ERROR))


def _rows(files: list[Path], request: Request, on_error: str, skipped: Skipped) -> Iterator[Row]:
    nothing = True
    for path in files:
        empty, before = True, _state(path)
        try:
            with in_one_line(path), closing(_entries(path, request)) as entries:
                for row in _usable(entries, str(path), on_error, skipped):
                    empty = nothing = False
                    yield row
        except DataError:
            _check_unchanged(path, before)  # half a row is to be expected of a file that is still being written
            raise
        _check_unchanged(path, before)
        if empty and len(files) > 1:
            skipped.add("empty file", str(path))
    if nothing:
        which = f"{files[0]} is" if len(files) == 1 else f"each of the {len(files)} files is"
        raise DataError(f"{which} empty: there is no row to use ({skipped})")


def _entries(path: Path, request: Request) -> Generator[Entry, None, None]:
    reader = READERS[kind_of(path)]
    with opened(path) as stream:
        yield from reader(path, stream, request)


def _usable(entries: Iterable[Entry], file: str, on_error: str, skipped: Skipped) -> Iterator[Row]:
    for number, entry in entries:
        if not isinstance(entry, Bad):
            yield Row(entry, file, number)
        elif entry is EMPTY or on_error == "skip":
            skipped.add(entry.reason, _where(file, number))
        else:
            raise DataError(f"{_where(file, number)}: {entry.message}")


def read_dataset(
    name: str,
    columns: Columns,
    split: str = "train",
    config: str | None = None,
    *,
    on_error: str = "stop",
    max_row_bytes: int = MAX_ROW_BYTES,
    skipped: Skipped | None = None,
    text: Sequence[str] | None = None,
) -> Iterator[Row]:
    """The rows of a Hugging Face dataset, by name or folder, as a stream; code that comes with a dataset is not run."""
    request = make_request(columns, None, "line", max_row_bytes, text)
    _check_on_error(on_error)
    skipped = Skipped() if skipped is None else skipped
    return _dataset_rows(f"{name}[{split}]", (name, config, split), request, on_error, skipped)


def _dataset_rows(
    shown: str, which: tuple[str, str | None, str], request: Request, on_error: str, skipped: Skipped
) -> Iterator[Row]:
    empty = True
    for row in _usable(_dataset_entries(shown, *which, request), shown, on_error, skipped):
        empty = False
        yield row
    if empty:
        raise DataError(f"{shown} is empty: there is no row to use ({skipped})")


def _dataset_entries(shown: str, name: str, config: str | None, split: str, request: Request) -> Iterator[Entry]:
    datasets = package("datasets", "datasets")
    try:
        for number, values in enumerate(datasets.load_dataset(name, config, split=split, streaming=True), 1):
            yield number, request.pick(values)
    except Exception as error:  # the library, and what it stands on, raise errors of every kind
        raise DataError(f"{shown} cannot be read: {first_line(error)}") from None
