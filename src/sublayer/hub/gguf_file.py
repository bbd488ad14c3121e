"""The container of a GGUF file: its header, checked as it is read, and where each tensor lies.

The header is parsed here and not by the gguf library, whose reader loops for ever on some damaged files; the library
knows the quantised types.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .tensors import CheckpointError, StoredTensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# The types of values in the header: struct's letter for a number; strings and arrays are apart.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6


def library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("reading GGUF needs the gguf package: pip install 'sublayer[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class Entry:
    """A tensor as the header describes it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    row_bytes: int

    def stored(self, path: Path, gguf: Any, order: Tensor | None) -> StoredTensor:
        """`order` says which row of the file each row of ours is."""
        width, kind, row_bytes = (self.shape[-1] if len(self.shape) > 1 else 1), self.kind, self.row_bytes
        dtype = PLAIN.get(kind, torch.float32)

        def decode(raw: np.ndarray[Any, Any]) -> Tensor:
            if kind in PLAIN:
                return torch.from_numpy(raw).view(dtype)
            with np.errstate(all="ignore"):  # what is not a number is found and named by the reader of the tensor
                return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))

        def read(start: int, stop: int, into: Tensor) -> None:
            first, last = start // width, -(-stop // width)
            rows = torch.arange(first, last, device="cpu") if order is None else order[first:last]
            low, high = int(rows.min()), int(rows.max()) + 1  # within the heads asked for
            raw = np.empty((high - low, row_bytes), dtype=np.uint8)
            _fill(path, self.offset + low * row_bytes, raw)
            values = decode(raw if order is None else raw[(rows - low).numpy()])
            into.copy_(values.reshape(-1)[start - first * width : stop - first * width])

        return StoredTensor(self.name, path, dtype, self.shape, read)


def _fill(path: Path, place: int, into: np.ndarray[Any, Any]) -> None:
    view = into.reshape(-1).data
    with path.open("rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], place)
            if not count:
                raise CheckpointError(f"{path} ended early: it changed while it was read")
            view, place = view[count:], place + count


class Header:
    """Parses what may be damaged: nothing is reserved or repeated on the word of a number in the file alone."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, gguf: Any) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.file.read(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        version = self.number("I")
        if version not in (2, 3):
            big = " (or is big-endian)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path} is GGUF version {version}{big}; supported are versions 2 and 3")
        tensors, keys = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.name()
            if key in metadata:
                raise CheckpointError(f"{self.path} has the key {key!r} twice")
            metadata[key] = self.value(key, self.number("I"))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.name()
            if name in infos:
                raise CheckpointError(f"{self.path} has the tensor {name!r} twice")
            dimensions = self.number("I")
            if not 1 <= dimensions <= 4:
                raise CheckpointError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; expected 1 to 4")
            shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            infos[name] = (shape, self.number("I"), self.number("Q"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; expected a power of two")
        start = -(-self.file.tell() // alignment) * alignment
        return metadata, {name: self.entry(gguf, name, start, *info) for name, info in infos.items()}

    def entry(self, gguf: Any, name: str, start: int, shape: tuple[int, ...], number: int, offset: int) -> Entry:
        kinds = {kind.value: kind for kind in gguf.GGMLQuantizationType}
        kind = kinds[number].name if number in kinds else f"number {number}"
        if kind not in PLAIN and kind not in QUANTISED:
            known = ", ".join([*PLAIN, *QUANTISED])
            raise CheckpointError(f"{self.path}: tensor {name!r} is of type {kind}; supported are {known}")
        block, size = gguf.GGML_QUANT_SIZES[kinds[number]]
        width = shape[-1] if len(shape) > 1 else 1
        if width % block or 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {name!r} of type {kind} cannot have the shape {shape}")
        row_bytes = width // block * size
        if start + offset + math.prod(shape) // width * row_bytes > self.size:
            raise CheckpointError(f"{self.path} ends inside the tensor {name!r}; download it again")
        return Entry(name, kind, shape, start + offset, row_bytes)

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise CheckpointError(f"{self.path} ends inside its header; download it again")
        return self.file.read(count)

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def name(self) -> str:
        name = self.text()
        if len(name) > 256:
            raise CheckpointError(f"{self.path} has a name of {len(name)} characters in its header; it is damaged")
        return name

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _FLOAT32:  # the shortest number that is this float32: 1e-05, and not 9.999999747378752e-06
            return float(str(np.float32(self.number("f"))))
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: the key {key!r} has a value of unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self.path}: the key {key!r} is an array of type {kind}, which is not supported")
        letter = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize("<" + letter))))
