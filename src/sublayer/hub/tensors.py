"""Tensors on disk: found and checked without being read, then read once, straight into their place."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_JSON_BYTES = 64 << 20
CHUNK_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, said in one line that names the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `read(start, stop, into)` fills a flat tensor with that range of its elements.

    `mapping` is the file in memory, where it can be mapped: nothing is read before it is used, and what is written to a
    tensor in it stays private.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int, Tensor], None]
    mapping: Mapping | None = None
    offset: int = 0  # in the mapping, in bytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def load(self) -> Tensor:
        """The whole tensor, in the dtype of the file."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(out)
        return out

    def copy_to(self, destination: Tensor) -> None:
        """Into memory that is there already, whatever its dtype and device, holding no more than a chunk beside it."""
        flat, whole = destination.view(-1), self.mapped()
        for start, stop in self._chunks():
            if whole is not None:
                part = whole.view(-1)[start:stop]
            else:
                part = torch.empty(stop - start, dtype=self.dtype, device="cpu")
                self.read(start, stop, part)
            self._refuse_nan(part)
            flat[start:stop].copy_(part)
            if self.mapping is not None:
                self.mapping.forget(self.offset + start * self.dtype.itemsize, self.offset + stop * self.dtype.itemsize)

    def mapped(self) -> Tensor | None:
        """The tensor in place, without a copy, where the file allows it."""
        return None if self.mapping is None else self.mapping.view(self.dtype, self.shape, self.offset)

    def check(self) -> None:
        """Look through a mapped tensor for NaN; a copy is looked through as it is made."""
        whole = self.mapped()
        if whole is not None:
            for start, stop in self._chunks():
                self._refuse_nan(whole.view(-1)[start:stop])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        step = max(1, CHUNK_BYTES // self.dtype.itemsize)
        return ((start, min(start + step, self.numel)) for start in range(0, self.numel, step))

    def _refuse_nan(self, part: Tensor) -> None:
        # A sum that is a number holds no NaN; only when it is not are the values looked at one by one.
        if part.is_floating_point() and math.isnan(float(part.sum())) and bool(part.isnan().any()):
            raise CheckpointError(f"{self.file}: tensor {self.name!r} holds NaN; the file is damaged or badly trained")

    def same_as(self, other: StoredTensor) -> bool:
        """Whether two stored tensors are equal, without holding either."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        for start, stop in self._chunks():
            mine, theirs = (torch.empty(stop - start, dtype=self.dtype, device="cpu") for _ in range(2))
            self.read(start, stop, mine)
            other.read(start, stop, theirs)
            if not torch.equal(mine, theirs):
                return False
        return True


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file that somebody else wrote."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} is larger than {limit >> 20} MB; that is no configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder in Hugging Face's format, by the name it has on disk."""
    for single, opener in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_pickle_free)):
        index = folder / f"{single}.index.json"
        if index.exists():
            return _sharded(folder, index, opener)
        if (folder / single).exists():
            return opener(folder / single)
    raise CheckpointError(
        f"{folder} holds no weights: expected model.safetensors, or shards with model.safetensors.index.json"
    )


def _sharded(folder: Path, index: Path, opener: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(places.values())):
        # Only plain names beside the index: a path could lead anywhere.
        if Path(name).name != name or name == index.name:
            raise CheckpointError(f"{index} names the shard {name!r}; expected a plain file name beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name!r}, which is not there; download it again")
        shards[name] = opener(folder / name)
    for tensor, name in places.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{folder / name} lacks the tensor {tensor!r} that {index.name} says it holds")
    return {tensor: shards[name][tensor] for tensor, name in places.items()}


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The header is checked by the safetensors library; the data is read by offset, so that none is held twice."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}; download or save it again") from None
    tensors = {}
    mapping = Mapping(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry['dtype']}; supported are {known}")
        dtype, shape, offset = DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        tensors[name] = StoredTensor(name, path, dtype, shape, _file_reader(path, offset), mapping, offset)
    return tensors


class Mapping:
    """A file mapped into memory on first use, and for as long as a tensor in it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: mmap.mmap | None = None

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor | None:
        """The tensor at an offset, or None where it is empty or does not start at a multiple of its width."""
        if offset % dtype.itemsize or not math.prod(shape):
            return None
        if self.memory is None:
            with self.path.open("rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self.memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def forget(self, start: int, stop: int) -> None:
        """Give back the pages of a range that was copied elsewhere: they would count as memory in use."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if self.memory is not None and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED, start, length)


def _file_reader(path: Path, offset: int) -> Callable[[int, int, Tensor], None]:
    def read(start: int, stop: int, into: Tensor) -> None:
        width = into.dtype.itemsize
        view = into.view(torch.uint8).numpy().data
        with path.open("rb", buffering=0) as file:
            place = offset + start * width
            while view:
                count = os.preadv(file.fileno(), [view], place)
                if not count:
                    raise CheckpointError(f"{path} ended early: it changed while it was read")
                view, place = view[count:], place + count

    return read


def open_pickle_free(path: Path) -> dict[str, StoredTensor]:
    """`pytorch_model.bin` through torch's weights-only reader: tensors and nothing that could run."""
    import pickle

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} is refused: torch's weights-only reader cannot read it ({reason}); "
            "ask for the checkpoint as safetensors"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path} holds more than named tensors; ask for the checkpoint as safetensors")
    return {str(name): from_memory(str(name), path, tensor) for name, tensor in loaded.items()}


def from_memory(name: str, file: Path, tensor: Tensor) -> StoredTensor:
    def read(start: int, stop: int, into: Tensor) -> None:
        into.copy_(tensor.reshape(-1)[start:stop])

    return StoredTensor(name, file, tensor.dtype, tuple(tensor.shape), read)
