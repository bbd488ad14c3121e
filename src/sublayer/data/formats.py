"""How each kind of file is read: an open stream of bytes becomes numbered entries, one row at a time.

Files are other people's: a row is bounded while it is read, and nothing in it is executed. A bad row is yielded as a
`Bad` value instead of being raised, because a generator that has raised cannot go on to the next row.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..config import unknown

DOCUMENTS = ("line", "paragraph", "file")
TEXT_COLUMNS = ("text", "pair", "source", "target", "question", "context", "prompt", "completion", "input")
MAY_BE_EMPTY = ("input",)
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
PIECE = 64 << 10
BUFFER = 1 << 20


class DataError(ValueError):
    """What is wrong with the data, in one line."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that cannot be used: a word or two to count it by, and what to tell the user."""

    reason: str
    message: str


EMPTY = Bad("empty", "is empty")
Entry = tuple[int, dict[str, Any] | Bad]
Line = tuple[int, str | Bad]
Columns = Mapping[str, str] | Sequence[str]


@dataclass(frozen=True)
class Request:
    """What the caller wants of each file."""

    wanted: dict[str, str]  # the caller's name of a column -> its name in the file
    names: list[str] | None
    documents: str
    limit: int  # bytes in a row
    text: tuple[str, ...]  # the wanted columns that must hold text

    def pick(self, values: Mapping[str, Any]) -> dict[str, Any] | Bad:
        try:
            return self.check({name: values[key] for name, key in self.wanted.items()})
        except KeyError as error:
            return Bad("missing column", lacks(error.args[0], list(values)))

    def check(self, values: dict[str, Any]) -> dict[str, Any] | Bad:
        """The row again, unless a text in it is absent, too long, or no text."""
        for name in self.text:
            value = values[name]
            if value is None or (isinstance(value, str) and (not value or value.isspace())):
                if name in MAY_BE_EMPTY:
                    continue
                return EMPTY
            if not isinstance(value, str):
                return Bad("not text", f"column {name!r} holds {type(value).__name__}; expected text")
            if len(value) * 4 > self.limit and len(value.encode()) > self.limit:
                return too_long(self.limit)
        return values


def make_request(
    columns: Columns, names: Sequence[str] | None, documents: str, limit: int, text: Sequence[str] | None
) -> Request:
    columns = (columns,) if isinstance(columns, str) else columns
    wanted = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    if not wanted:
        raise DataError("no column was asked for; name at least one")
    if documents not in DOCUMENTS:
        raise DataError(unknown("documents", documents, DOCUMENTS))
    if limit < 1:
        raise DataError(f"max_row_bytes is {limit}; it must be at least 1")
    of_text = tuple(name for name in wanted if name in (TEXT_COLUMNS if text is None else text))
    return Request(wanted, None if names is None else list(names), documents, limit, of_text)


# Opening


def package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        top = name.split(".")[0]
        raise DataError(f"this needs the package {top!r}: pip install 'sublayer[{extra}]'") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked as they are read. Arrow reads zstd because it tells when the end is missing."""
    with open(path, "rb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield io.BufferedReader(unpacked, BUFFER)
        elif path.suffix.lower() == ".zst":
            with package("pyarrow", "files").input_stream(raw, compression="zstd") as unpacked:
                yield io.BufferedReader(unpacked, BUFFER)
        else:
            yield raw


@contextmanager
def in_one_line(path: Path) -> Iterator[None]:
    """What a missing or damaged file makes the libraries raise, as one clear line."""
    packing = PACKINGS.get(path.suffix.lower())
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(_damaged(path, packing or "compressed", error)) from None
    except OSError as error:
        if packing == "zstd" and error.errno is None:  # Arrow's own; the system's have a number
            raise DataError(_damaged(path, packing, error)) from None
        raise DataError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None


def _damaged(path: Path, packing: str, error: Exception) -> str:
    return f"{path} is not a complete {packing} file ({first_line(error)}); copy or make it again"


# Sentences


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def lacks(name: str, columns: Sequence[str]) -> str:
    """The sentence for an absent column. What was taken for a header may be a row of long texts, so names are cut."""
    return unknown("column", name, [" ".join(str(column).split())[:40] for column in columns[:40]])


def check_columns(where: str, keys: Iterable[str], columns: Sequence[str]) -> None:
    for key in keys:
        if key not in columns:
            raise DataError(f"{where}: {lacks(key, columns)}")
        if columns.count(key) > 1:
            raise DataError(f"{where}: {columns.count(key)} columns are called {key!r}; give each its own name")


def too_long(limit: int) -> Bad:
    return Bad("too long", f"is longer than {limit:,} bytes; split it, or raise data.max_row_bytes")


def invalid(error: UnicodeDecodeError, before: int = 0) -> Bad:
    place = before + error.start
    return Bad("invalid UTF-8", f"is not valid UTF-8 at byte {place:,} of the row; save the file as UTF-8")


# Lines and plain text


def read_lines(stream: BinaryIO, limit: int) -> Iterator[Line]:
    """Numbered lines without their ends. Of a line beyond the limit only that many bytes are ever held."""
    for number in itertools.count(1):
        raw = stream.readline(limit + 2)
        if not raw:
            return
        line = raw[:-2] if raw.endswith(b"\r\n") else raw.removesuffix(b"\n")
        if len(line) > limit:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(BUFFER)
            yield number, too_long(limit)
            continue
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            yield number, invalid(error)
            continue
        yield number, decoded.removeprefix("\ufeff") if number == 1 else decoded


def read_text(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    for key in request.wanted.values():
        if key != "text":
            raise DataError(f"{path} is plain text: {lacks(key, ['text'])}; several columns need TSV, CSV or JSONL")
    if request.documents == "file":
        going = False
        for number, piece in _pieces(stream):
            if isinstance(piece, Bad):
                yield number, piece
            elif going or piece.strip():
                yield number, dict.fromkeys(request.wanted, piece) | {"continued": going}
                going = True
        return
    lines = read_lines(stream, request.limit)
    for number, line in _paragraphs(lines, request.limit) if request.documents == "paragraph" else lines:
        if isinstance(line, Bad):
            yield number, line
        elif line and not line.isspace():
            yield number, dict.fromkeys(request.wanted, line)


def _paragraphs(lines: Iterable[Line], limit: int) -> Iterator[Line]:
    parts: list[str] = []
    first, size, dropped = 0, 0, False
    for number, line in itertools.chain(lines, ((0, ""),)):
        if isinstance(line, Bad):
            yield number, line
            parts, dropped = [], True
        elif not line or line.isspace():
            if parts:
                yield first, "\n".join(parts)
            parts, size, dropped = [], 0, False
        elif not dropped:
            first = first if parts else number
            parts.append(line)
            size += len(line.encode()) + 1
            if size - 1 > limit:
                yield first, too_long(limit)
                parts, dropped = [], True


def _pieces(stream: BinaryIO) -> Iterator[Line]:
    """The whole text in pieces of about 64 KiB, cut at ends of lines; a longer line is cut between characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    number, first, size, offset = 1, 1, 0, 0
    while True:
        raw = stream.readline(PIECE)
        waiting = len(decoder.getstate()[0])  # bytes of a character that the last cut went through
        try:
            text = decoder.decode(raw, final=not raw or raw.endswith(b"\n"))
        except UnicodeDecodeError as error:
            yield number, invalid(error, offset - waiting)
            text, rest = "", codecs.getincrementaldecoder("utf-8")("ignore")
            rest.decode(raw)
            decoder.setstate(rest.getstate())
        end_of_line = raw == b"\n" and parts and parts[-1].endswith("\r")  # the cut went through "\r\n"
        if parts and (not raw or size + len(raw) > PIECE) and not end_of_line:
            yield first, "".join(parts).replace("\r\n", "\n")
            parts, size = [], 0
        if not raw:
            return
        if text:
            first = first if parts else number
            parts.append(text.removeprefix("\ufeff") if number == 1 and not offset else text)
            size += len(raw)
        number, offset = (number + 1, 0) if raw.endswith(b"\n") else (number, offset + len(raw))


# JSON and Parquet


def read_jsonl(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    for number, line in read_lines(stream, request.limit):
        if isinstance(line, Bad):
            yield number, line
        elif line and not line.isspace():
            yield number, _object(line, request)


def _object(line: str, request: Request) -> dict[str, Any] | Bad:
    try:
        value = json.loads(line)
        if "\\ud" in line or "\\uD" in line:  # an escape can name half a character, which no UTF-8 can hold
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Bad("invalid UTF-8", "escapes half of a surrogate pair, which is no character")
    except (ValueError, RecursionError) as error:
        return Bad("broken JSON", f"is not valid JSON ({first_line(error)}); expected one object per line")
    if not isinstance(value, dict):
        return Bad("broken JSON", f"is a JSON {type(value).__name__}; expected an object")
    return request.pick(value)


def read_parquet(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    """Parquet is read from its end, so a packed file is first unpacked into a temporary one."""
    if path.suffix.lower() not in PACKINGS:
        yield from _parquet(path, stream, request)
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, BUFFER)
        unpacked.seek(0)
        yield from _parquet(path, unpacked, request)


def _parquet(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    arrow, parquet = package("pyarrow", "files"), package("pyarrow.parquet", "files")
    keys = list(dict.fromkeys(request.wanted.values()))
    number = 0
    try:
        file = parquet.ParquetFile(stream)
        check_columns(str(path), keys, file.schema_arrow.names)
        # Without threads of Arrow's own, reading is safe in a forked worker.
        for batch in file.iter_batches(256, columns=keys, use_threads=False):
            for values in zip(*(_python_values(batch.column(key)) for key in keys), strict=True):
                number += 1
                bad = next((value for value in values if isinstance(value, Bad)), None)
                yield number, bad or request.pick(dict(zip(keys, values, strict=True)))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a complete Parquet file ({first_line(error)}); make it again") from None


def _python_values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_python_value(value) for value in column]


def _python_value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return invalid(error)
