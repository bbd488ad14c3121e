"""Tables of text: TSV and CSV, with a header or without."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from .formats import BUFFER, EMPTY, Bad, DataError, Entry, Request, check_columns, invalid, lacks, read_lines, too_long

Record = tuple[int, list[str] | Bad]


def read_tsv(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    """Cells between tabs and nothing more: real corpora are full of quotes that were never meant as quoting."""
    lines = read_lines(stream, request.limit)
    return _table(path, ((n, line if isinstance(line, Bad) else line.split("\t")) for n, line in lines), request)


def read_csv(path: Path, stream: BinaryIO, request: Request) -> Iterator[Entry]:
    return _table(path, _csv_records(stream, request.limit), request)


def _table(path: Path, records: Iterable[Record], request: Request) -> Iterator[Entry]:
    layout: list[str] | None = None  # the name of each column; "" where it does not matter
    places: dict[str, int] = {}
    for number, cells in records:
        if isinstance(cells, Bad):
            yield number, cells
            continue
        if not any(cell and not cell.isspace() for cell in cells):
            yield number, EMPTY
            continue
        if layout is None and request.names is None and len(cells) < len(set(request.wanted.values())):
            yield number, _wrong_width(cells, f"at least {len(request.wanted)}: {', '.join(request.wanted)}")
            continue
        if layout is None:
            layout, is_header = _layout(f"{path}, row {number}", [cell.strip() for cell in cells], request)
            places = {name: layout.index(key) for name, key in request.wanted.items()}
            if is_header:
                continue
        if len(cells) != len(layout):
            yield number, _wrong_width(cells, f"{len(layout)}, as the first row or the names say")
            continue
        yield number, request.check({name: cells[place] for name, place in places.items()})


def _wrong_width(cells: list[str], expected: str) -> Bad:
    columns = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
    return Bad("wrong number of columns", f"has {columns}; expected {expected}")


def _layout(where: str, cells: list[str], request: Request) -> tuple[list[str], bool]:
    """What the columns of a table are called, by its first row or by the caller, and whether that row is a header."""
    keys = list(request.wanted.values())
    is_header = set(keys) <= set(cells)
    if not is_header and request.names is None:
        looks = {cell.casefold() for cell in cells} & {key.casefold() for key in keys}
        mapped = any(name != key for name, key in request.wanted.items())
        if mapped or looks:
            absent = next(key for key in keys if key not in cells)
            raise DataError(f"{where}: {lacks(absent, cells)}; if the row is data and no header, give names")
        return [""] * (len(cells) - len(keys)) + keys, False
    layout = cells if is_header else list(request.names or ())
    check_columns(where, keys, layout)
    return layout, is_header


class _CsvLines:
    """The lines of one record at a time for the csv module, which asks for more while a quoted field is open.

    What is wrong with a line is kept in `bad` until the record ends, lest the rest of a quoted field pass for a row.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self.stream, self.limit = stream, limit
        self.left, self.number = limit, 0
        self.bad: Bad | None = None

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        raw = self.stream.readline(self.left + 2)
        if not raw:
            raise StopIteration
        self.number += 1
        if len(raw.rstrip(b"\r\n")) > self.left:
            self.left, self.bad = 0, too_long(self.limit)
            quotes = raw.count(b'"')
            while raw and not raw.endswith(b"\n"):
                raw = self.stream.readline(BUFFER)
                quotes += raw.count(b'"')
            return '"' * (quotes % 2)  # all that decides whether the record goes on
        before = self.limit - self.left
        self.left = max(0, self.left - len(raw))
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            self.bad = self.bad or invalid(error, before)
            line = raw.decode(errors="replace")
        return line.removeprefix("\ufeff") if self.number == 1 else line

    def begin(self) -> int:
        """The number of the line at which the next record begins."""
        self.left, self.bad = self.limit, None
        return self.number + 1


def _csv_records(stream: BinaryIO, limit: int) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # the module's own limit is for the whole process
    lines = _CsvLines(stream, limit)
    reader = csv.reader(lines, strict=True)
    while True:
        first = lines.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, lines.bad or Bad("broken CSV", f"is not valid CSV ({error}); check its quotes and line ends")
            continue
        yield first, lines.bad or cells
