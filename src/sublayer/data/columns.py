"""What the columns of data are called, from its first row."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from .formats import Bad, DataError, first_line, in_one_line, opened, package, read_lines
from .readers import MAX_ROW_BYTES, find_files, kind_of


def columns_of(where: str | Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """The names of the columns; of a table without a header they are what its first row holds, unless given."""
    if isinstance(where, str) and where.startswith("datasets:"):
        return _of_dataset(where)
    from .images import find_images

    if find_images(where) is not None:
        return ["image", "label"]
    path = find_files(where)[0]
    kind = kind_of(path)
    if kind == "text":
        return ["text"]
    if names is not None and kind in ("tsv", "csv"):
        return list(names)
    with in_one_line(path):
        if kind == "parquet" and path.suffix.lower() == ".parquet":
            return _of_parquet(path)
        line, number = _first(path)
    if kind == "jsonl":
        return _of_object(line, f"{path}, row {number}")
    if kind == "parquet":
        raise DataError(f"{path} is a packed Parquet file; name the objective (--objective), or unpack it")
    cells = line.split("\t") if kind == "tsv" else next(csv.reader([line]), [])
    return [cell.strip() for cell in cells]


def _first(path: Path) -> tuple[str, int]:
    with opened(path) as stream:
        for number, line in read_lines(stream, MAX_ROW_BYTES):
            if isinstance(line, Bad):
                raise DataError(f"{path}, row {number}: {line.message}")
            if line and not line.isspace():
                return line, number
    raise DataError(f"{path} is empty: there is no row to use")


def _of_object(line: str, where: str) -> list[str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not valid JSON ({first_line(error)}); expected one object per line") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: is a JSON {type(value).__name__}; expected an object")
    return list(value)


def _of_parquet(path: Path) -> list[str]:
    arrow, parquet = package("pyarrow", "files"), package("pyarrow.parquet", "files")
    try:
        return list(parquet.ParquetFile(path).schema_arrow.names)
    except arrow.ArrowException as error:
        raise DataError(f"{path} is not a complete Parquet file ({first_line(error)}); make it again") from None


def _of_dataset(where: str) -> list[str]:
    datasets = package("datasets", "datasets")
    name, _, config = where.removeprefix("datasets:").partition(":")
    try:
        return list(next(iter(datasets.load_dataset(name, config or None, split="train", streaming=True))))
    except Exception as error:  # the library, and what it stands on, raise errors of every kind
        raise DataError(f"{where} cannot be read: {first_line(error)}") from None
