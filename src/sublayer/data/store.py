"""Tokenised rows on disk: ragged columns of whole numbers, memory-mapped, written once and used by every later run.

A store is a folder. For each field there are two files: `FIELD.bin`, all the numbers end to end, and `FIELD.ends.bin`,
where each row ends. The folder's name is a hash of the content and the settings it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

FORM = 1  # of the files; part of the key, so that a newer form never meets an older file


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: dict[str, NDArray[Any]] = {}
        self.ends: dict[str, NDArray[np.int64]] = {}
        try:
            self._open(json.loads((folder / "meta.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError):
            raise ValueError(f"{folder} is damaged; delete the folder, and it is made again") from None

    def _open(self, meta: dict[str, Any]) -> None:
        self.info: dict[str, Any] = meta["info"]
        self.rows: int = meta["rows"]
        for name, dtype in meta["fields"].items():
            self.ends[name] = _map(self.folder / f"{name}.ends.bin", np.dtype(np.int64))
            self.columns[name] = _map(self.folder / f"{name}.bin", np.dtype(dtype))
            written = int(self.ends[name][-1]) if self.rows else 0
            if len(self.ends[name]) != self.rows or len(self.columns[name]) != written:
                raise ValueError(f"{name} is not whole")

    def __len__(self) -> int:
        return self.rows

    def starts(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([[0], self.ends[name][:-1]]) if self.rows else self.ends[name]

    def lengths(self, name: str) -> NDArray[np.int64]:
        return np.diff(self.ends[name], prepend=0)

    def row(self, index: int) -> dict[str, NDArray[Any]]:
        out = {}
        for name, column in self.columns.items():
            ends = self.ends[name]
            out[name] = column[ends[index - 1] if index else 0 : ends[index]]
        return out


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


class Writer:
    """Rows are added in order; a row can be continued, so that a document need not fit in memory."""

    def __init__(self, folder: Path, fields: Mapping[str, str]) -> None:
        self.folder, self.fields = folder, dict(fields)
        self.files: dict[str, BinaryIO] = {name: (folder / f"{name}.bin").open("wb") for name in fields}
        self.ends: dict[str, list[int]] = {name: [] for name in fields}

    def __len__(self) -> int:
        return len(next(iter(self.ends.values())))

    def add(self, row: Mapping[str, Sequence[int] | NDArray[Any]], *, continued: bool = False) -> None:
        for name, dtype in self.fields.items():
            values = np.asarray(row[name])
            if values.size and (values.min() < np.iinfo(dtype).min or values.max() > np.iinfo(dtype).max):
                raise ValueError(f"a value of {name} does not fit {dtype}: {values.min()} to {values.max()}")
            self.files[name].write(values.astype(dtype).tobytes())
            ends = self.ends[name]
            if continued:
                ends[-1] += values.size
            else:
                ends.append((ends[-1] if ends else 0) + values.size)

    def finish(self, info: dict[str, Any]) -> None:
        for name, file in self.files.items():
            file.close()
            np.asarray(self.ends[name], np.int64).tofile(self.folder / f"{name}.ends.bin")
        meta = {"fields": self.fields, "rows": len(self), "info": info}
        (self.folder / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")


def cache_folder(given: str | None = None) -> Path:
    """Where tokenised data and compiled code are kept: as given, $SUBLAYER_CACHE, or the user's cache folder."""
    if given or os.environ.get("SUBLAYER_CACHE"):
        return Path(given or os.environ["SUBLAYER_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sublayer"


def key_of(*parts: Any) -> str:
    text = json.dumps([FORM, *parts], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build` unless it is there; made whole or not at all, whoever else makes it meanwhile."""
    if (folder / "meta.json").exists():
        return folder
    with _temporary(folder) as temporary:
        build(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "meta.json").exists():  # else another run was faster, with the same content
                raise
    return folder


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"no tokenised data can be kept in {folder.parent}: {error.strerror}; set data.cache"
        ) from None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
