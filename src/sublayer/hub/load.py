"""A folder in Hugging Face's format, or a GGUF file, to a model."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, unknown
from ..core.quantized import quantize_blocks
from ..models import Model, build, collector_paused, materialize, parse_dtype
from .download import resolve
from .families import FAMILIES
from .family import Family
from .plan import Move, fit
from .rules import SAME, Rule
from .tensors import CheckpointError, StoredTensor, find_tensors, read_json

OWN_TYPE = "sublayer"


def load_model(
    folder: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    bits: int | None = None,
) -> Model:
    """The model in a folder, ready to run: straight to its device, and in its own dtype unless told otherwise.

    With `bits`, 4 or 8, the projections are held in as many (`sublayer.lora.quantize`), and on a GPU they are never all
    there as a whole. `folder` may also be a GGUF file, or the name of a model on the hub (`organisation/name`). Nothing
    that the checkpoint contains is executed.
    """
    path = resolve(folder)
    if path.suffix == ".gguf":
        return _load_gguf(path, device, dtype, bits)
    theirs = read_json(path / "config.json")
    if theirs.get("auto_map"):
        raise CheckpointError(
            f"{path}: config.json asks for code of its own (auto_map), which is never run; "
            "a checkpoint of a supported architecture needs none"
        )
    stored = find_tensors(path)
    if theirs.get("model_type") == OWN_TYPE:
        model, plan, tensors = _fit_own(theirs, stored, path)
    else:
        family = find_family(theirs, path)
        model, plan, tensors = fit(family, family.read_config(theirs, architecture(theirs, family)), stored, path)
    with collector_paused():
        _fill(model, plan, tensors, device, dtype, bits)
    model.origin = theirs
    model.source = str(path.resolve()) if Path(folder).expanduser().exists() else str(folder)
    _read_generation(model, path / "generation_config.json")
    return model.eval()


def _read_generation(model: Model, path: Path) -> None:
    """The ids that end, pad and start an answer: this file, where there is one, has the last word on them."""
    if not path.exists():
        return
    model.generation = read_json(path)
    names = {"eos_token_id": "eos_id", "pad_token_id": "pad_id", "bos_token_id": "bos_id"}
    names["decoder_start_token_id"] = "start_id"
    ids = {ours: model.generation[key] for key, ours in names.items() if model.generation.get(key) is not None}
    try:
        model.config = dataclasses.replace(model.config, **ids)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def find_family(theirs: dict[str, Any], path: Path | str) -> Family:
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"{path}: " + unknown("model_type in config.json", kind, [*FAMILIES, OWN_TYPE]))
    return FAMILIES[kind]


def architecture(theirs: dict[str, Any], family: Family) -> str:
    named = theirs.get("architectures") or [next(iter(family.architectures))]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise CheckpointError(f"config.json: architectures is {named!r}; expected a list of class names")
    return named[0]


def _fit_own(
    theirs: dict[str, Any], stored: dict[str, StoredTensor], path: Path
) -> tuple[Model, list[Move], dict[str, StoredTensor]]:
    """Our own form, for what no public architecture can express: our configuration and our names."""
    values = theirs.get("sublayer")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: config.json of type 'sublayer' lacks its configuration")
    config = ModelConfig.from_dict(values)
    own = Family(
        model_type=OWN_TYPE, architectures={}, fixed={}, fields={},
        rules=lambda config: [Rule(name, (name,)) for name in stored],
    )  # fmt: skip
    return fit(own, config, stored, path)


def _fill(
    model: Model,
    plan: list[Move],
    tensors: dict[str, StoredTensor],
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    bits: int | None,
) -> None:
    """Give the model memory and read every tensor once into its place."""
    device = torch.device(device) if device is not None else torch.get_default_device()
    model.to(dtype=parse_dtype(dtype) or _usual_dtype(plan, tensors, device))
    if device.type == "meta":
        return
    room = device if bits is None else torch.device("cpu")
    materialize(model, lambda name, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=room))
    state = model.state_dict(keep_vars=True)
    for step in plan:
        places = [state[name].detach() for name in step.rule.ours]
        if step.stored not in tensors:
            places[0].zero_()
        elif step.rule.op is SAME:
            _place(tensors[step.stored], state[step.rule.ours[0]])
        else:
            for place, part in zip(places, step.rule.op.load(tensors[step.stored].load()), strict=True):
                place.copy_(part)
    if bits is not None:
        quantize_blocks(model, bits, device=device)


def _place(stored: StoredTensor, place: Tensor) -> None:
    """In the file itself, if the tensor is used as it is stored; else by one copy."""
    mapped = stored.mapped() if place.is_cpu and place.dtype == stored.dtype else None
    if mapped is not None:
        stored.check()
        place.data = mapped
    else:
        stored.copy_to(place.detach())


def _usual_dtype(plan: list[Move], tensors: dict[str, StoredTensor], device: torch.device) -> torch.dtype:
    counts = Counter(tensors[move.stored].dtype for move in plan if move.stored in tensors)
    usual = counts.most_common(1)[0][0] if counts else torch.float32
    # A CPU multiplies float16 so slowly that it seems to hang.
    return torch.float32 if usual == torch.float16 and device.type == "cpu" else usual


def _load_gguf(
    path: Path, device: torch.device | str | None, dtype: torch.dtype | str | None, bits: int | None
) -> Model:
    from .gguf import read_gguf

    checkpoint = read_gguf(path)
    model = build(checkpoint.config, device="meta")
    plan = [Move(name, Rule(name, (name,))) for name in checkpoint.tensors if name in model.state_dict()]
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    filled = {id(state[move.stored]) for move in plan}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing:
        raise CheckpointError(f"{path} lacks the tensor for {missing[0]!r}; the file is incomplete")
    for move in plan:
        if checkpoint.tensors[move.stored].shape != tuple(state[move.stored].shape):
            raise CheckpointError(f"{path}: the tensor for {move.stored!r} has another shape than the metadata says")
    _fill(model, plan, checkpoint.tensors, device, dtype, bits)
    return model.eval()
