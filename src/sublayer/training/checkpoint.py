"""Checkpoints: all that a run needs to go on as if it had never stopped, written whole or not at all.

    checkpoints/step-00000500/
        config.json, model.safetensors …   the model, in Hugging Face's form
        trainer.safetensors                optimiser, averages
        trainer.json                       step, place in the data, counters; written last

A sharded run keeps `shards/` instead of the files of tensors: safetensors too, through torch.distributed.checkpoint,
which loads them on any number of processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .distributed import World

NAME = re.compile(r"step-(\d{8})")
STATE, TENSORS, SHARDS = "trainer.json", "trainer.safetensors", "shards"


def save_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    write_model: Callable[[Path], None] | None,
    *,
    keep: int,
    world: World,
) -> Path:
    """Write checkpoint `step` under another name, make sure it is on the disk, rename it, and drop the oldest.

    `write_model` is None for a sharded run, whose weights are among the tensors.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    if world.main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.wait()
    try:
        if world.sharded:
            _save_shards(tensors, temporary / SHARDS)
        elif world.main:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary / TENSORS
            )
            assert write_model is not None
            write_model(temporary)
        world.wait()
        if world.main:
            (temporary / STATE).write_text(json.dumps(state), encoding="utf-8")
            _flush(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            _sync(folder)
            for old in sorted(_found(folder), key=lambda path: path.name)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, RuntimeError) and world.size > 1:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OSError(f"checkpoint {final.name} could not be written: {reason}; the ones before it are whole") from None
    world.wait()
    return final


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _found(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / STATE).exists()]


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    return sorted(_found(folder), key=lambda path: path.name)


def clean(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(".step-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of a run, and its tensors unless they are sharded."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        tensors = load_file(path / TENSORS) if (path / TENSORS).exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete that folder to go on from the one before") from None
    return state, tensors


def _save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, however they are sharded now, from a checkpoint of any number of processes."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path / SHARDS)))


def average_models(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several models' weights, as the paper took of its last checkpoints."""
    out = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            out[name] = first
            continue
        total = torch.zeros_like(first, dtype=torch.float64)
        for state in states:
            total += state[name]
        out[name] = (total / len(states)).to(first.dtype)
    return out
