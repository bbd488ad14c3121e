"""An adapter to a folder in PEFT's format, and back.

    adapter_config.json           rank, alpha, which modules
    adapter_model.safetensors     base_model.model.MODULE.lora_A.weight (r, in), .lora_B.weight (out, r), …

The names and forms of the base's weights on disk come from the same rules that read and write the base itself.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import unknown
from ..hub.rules import Op
from ..hub.save import atomic_folder
from ..hub.tensors import CheckpointError, StoredTensor, open_safetensors, read_json
from ..models import Model
from .layer import Adapter, Settings
from .manage import (
    adapter_dtype,
    attach,
    check_name,
    lengths,
    linear,
    make_adapter,
    make_copies,
    only,
    parts,
    state_of,
)
from .targets import Names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 4 << 20
LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector(\.weight)?)")
# Settings that change what an adapter computes, and the values that do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "lora_bias": (False, None), "use_qalora": (False, None), "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []), "trainable_token_indices": (None, [], {}), "target_parameters": (None, []),
    "use_bdlora": (None, False), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    "velora_config": (None,), "megatron_config": (None,),
}  # fmt: skip
# How PEFT made the first values. Its other ways change the base too, which the file of an adapter does not hold.
INITS = (True, False, None, "gaussian", "eva", "orthogonal")


# Writing


def save(model: Model, folder: str | os.PathLike[str], name: str | None = None, *, base: str | None = None) -> None:
    """Write one adapter, the one in use unless named. `base` is what the file says the adapter belongs to."""
    from safetensors.torch import save_file

    name = only(model, name)
    settings, names = state_of(model).settings[name], Names.of(model)
    entries = {path: layer.lora[name] for path, layer in parts(model).items() if name in layer.lora}
    adapters = {path: entry for path, entry in entries.items() if isinstance(entry, Adapter)}
    copies = {path: entry for path, entry in entries.items() if not isinstance(entry, Adapter)}
    modules = {names.modules[path]: names.group(path) for path in adapters}
    tensors: dict[str, Tensor] = {}
    for module, group in modules.items():
        tensors |= _lora_tensors(model, names, module, [adapters.get(path) for path in group], group)
    for path, copy in copies.items():
        for key, value in copy.named_parameters():
            tensor = f"{names.modules[path]}.{key}"
            tensors[tensor] = names.rules[tensor].op.save([value])
    config = _config(settings, names, adapters, sorted({names.modules[path] for path in copies}))
    config["base_model_name_or_path"] = base or model.source
    with atomic_folder(Path(folder)) as temporary:
        stored = {PREFIX + key: value.detach().to("cpu").contiguous().clone() for key, value in tensors.items()}
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"} | _partly(modules, adapters))
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _partly(modules: Mapping[str, Sequence[str]], adapters: Mapping[str, Adapter]) -> dict[str, str]:
    """PEFT cannot say that of several layers in one module only some have the adapter, so the file says it for us."""
    whole = all(path in adapters for group in modules.values() for path in group)
    return {} if whole else {"layers": json.dumps(list(adapters))}


def _lora_tensors(
    model: Model, names: Names, module: str, adapters: Sequence[Adapter | None], group: Sequence[str]
) -> dict[str, Tensor]:
    """The matrices of one module on disk. A part of it without an adapter has a B of zeros, and its own length."""
    op = names.rules[f"{module}.weight"].op
    first = next(adapter for adapter in adapters if adapter is not None)
    bs, magnitudes = [], []
    for adapter, path in zip(adapters, group, strict=True):
        layer = linear(model, path)
        bs.append(first.b.new_zeros(layer.out_features, first.rank) if adapter is None else adapter.b)
        own = None if adapter is None else adapter.magnitude
        magnitudes.append(lengths(layer, first.a.dtype) if own is None else own)
    out = {f"{module}.lora_A.weight": first.a, f"{module}.lora_B.weight": _join(op, bs)}
    if first.magnitude is not None:
        out[f"{module}.lora_magnitude_vector"] = _join(op, [magnitude[:, None] for magnitude in magnitudes])[:, 0]
    return out


def _join(op: Op, parts: Sequence[Tensor]) -> Tensor:
    """Rows of ours to rows on disk. PEFT keeps B as (out, r) even where the weight is (in, out)."""
    joined = op.save(parts)
    return joined.T if op.transposed else joined


def _split(op: Op, stored: Tensor) -> Sequence[Tensor]:
    return op.load(stored.T if op.transposed else stored)


def _config(settings: Settings, names: Names, adapters: Mapping[str, Adapter], full: list[str]) -> dict[str, Any]:
    modules = {names.modules[path]: adapter for path, adapter in adapters.items()}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "bias": "none",
        "fan_in_fan_out": any(names.rules[f"{module}.weight"].op.transposed for module in modules),
        "target_modules": _short(modules, names),
        "modules_to_save": full or None,
        "rank_pattern": {name: a.rank for name, a in modules.items() if a.rank != settings.rank},
        "alpha_pattern": {name: a.alpha for name, a in modules.items() if a.alpha != settings.alpha},
        "init_lora_weights": True,
    }


def _short(modules: Mapping[str, Adapter], names: Names) -> list[str]:
    """Each module by the end of its name, where all modules that end so are adapted; else by the whole of it."""
    others = [name for name in names.modules.values() if name not in modules]
    out = set()
    for name in modules:
        end = name.rpartition(".")[2]
        out.add(name if any(f".{other}".endswith(f".{end}") for other in others) else end)
    return sorted(out)


# Reading


def load(model: Model, folder: str | os.PathLike[str], name: str = "default", trainable: bool = False) -> None:
    """Put the adapter of a folder around the model's layers, and let it answer. Nothing in the folder is executed."""
    path = Path(folder).expanduser()
    check_name(model, name)
    config = read_config(path)
    names = Names.of(model)
    tensors = _tensors(path)
    modules: dict[str, dict[str, StoredTensor]] = {}
    full: dict[str, StoredTensor] = {}
    current = {stored: module for module, stored in names.stored.items()}
    for key, tensor in tensors.items():
        found = LORA.fullmatch(key)
        if found:
            module = current.get(found["module"], found["module"])
            modules.setdefault(module, {})[found["part"].removesuffix(".weight")] = tensor
        elif ".lora_" in key:
            raise CheckpointError(f"{tensor.file}: {key!r} adapts no linear layer; only those are supported")
        else:
            module, _, part = key.rpartition(".")
            full[f"{current.get(module, module)}.{part}"] = tensor
    settings = Settings(
        rank=config["r"], alpha=config["lora_alpha"], dropout=config["lora_dropout"], rslora=config["use_rslora"],
        dora=config["use_dora"], trainable=trainable,
    )  # fmt: skip
    entries: dict[str, nn.Module] = {}
    chosen = _chosen_layers(path / WEIGHTS)
    for module, found_parts in modules.items():
        made = _read_module(model, names, config, settings, module, found_parts)
        entries |= {layer: adapter for layer, adapter in made.items() if chosen is None or layer in chosen}
    entries |= _read_full(model, names, full)
    if not entries:
        raise CheckpointError(f"{path / WEIGHTS} holds no adapter")
    _same_base(config, model)
    attach(model, name, settings, entries)


def base_of(folder: str | os.PathLike[str]) -> str | None:
    """The base of an adapter, if the folder holds one and not a model."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() or any(path.glob("model*.safetensors")):
        return None
    base = read_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).expanduser().exists():
        raise CheckpointError(
            f"{path} holds an adapter for {base!r}, which is not here; load that, then the adapter (sublayer.lora.load)"
        )
    return base


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, once it is known to ask for nothing but what is supported."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}; expected a folder with an adapter in PEFT's format")
    config = read_json(path, MAX_CONFIG_BYTES)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' is supported")
    for key, plain in PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, which is not supported; expected {plain[0]!r}")
    if config.get("init_lora_weights", True) not in INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights is {config['init_lora_weights']!r}, which changes the base too; "
            "convert it with PEFT to a plain LoRA first"
        )
    usual: dict[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    config = usual | config
    for key in ("use_rslora", "use_dora"):
        if not isinstance(config[key], bool):
            raise CheckpointError(f"{path}: {key} is {config[key]!r}; expected true or false")
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = config.get(key) or {}
        if not isinstance(config[key], dict):
            raise CheckpointError(f"{path}: {key} is {config[key]!r}; expected names of modules and their numbers")
        for pattern, number in config[key].items():
            _check_pattern(pattern, path)
            if not isinstance(number, int | float) or not number > 0:
                raise CheckpointError(f"{path}: {key} gives {number!r} for {pattern!r}; expected a number above 0")
    return config


def _check_pattern(pattern: str, path: Path) -> None:
    """A regular expression of somebody else's that could take for ever is not tried."""
    if len(pattern) > 300 or re.search(r"\)\s*[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        raise CheckpointError(f"{path}: the pattern {pattern!r} is too involved; expected names of modules")
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{path}: the pattern {pattern!r} is no regular expression: {error}") from None


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """PEFT's rule: the first pattern that fits the end of a name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which is never read)" if (folder / "adapter_model.bin").exists() else ""
        )
        raise CheckpointError(f"{folder} has no {WEIGHTS}{pickled}; save the adapter as safetensors")
    tensors = open_safetensors(path)
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX) or not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{path}: {key!r} is no weight of an adapter; expected floats named {PREFIX}…")
    return {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}


def _chosen_layers(path: Path) -> list[str] | None:
    """Of a module that is several layers of ours, which have the adapter; a file of PEFT's does not say: all."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        said = (file.metadata() or {}).get("layers")
    try:
        layers = json.loads(said) if said else None
    except (ValueError, RecursionError):
        layers = None
    return layers if isinstance(layers, list) else None


def _read_module(
    model: Model, names: Names, config: dict[str, Any], settings: Settings, module: str, found: dict[str, StoredTensor]
) -> dict[str, Adapter]:
    """The adapters of the layers that are one module on disk."""
    file = next(iter(found.values())).file
    group = next((names.group(path) for path, stored in names.modules.items() if stored == module), ())
    if not group or not all(path in names.linear for path in group):
        known = {names.modules[path] for path in names.linear if path in names.modules}
        raise CheckpointError(f"{file}: {_no(module, 'module', known)}")
    for part in ("lora_A", "lora_B", *(["lora_magnitude_vector"] if settings.dora else [])):
        if part not in found:
            raise CheckpointError(f"{file}: {module!r} lacks its {part}; the file is incomplete")
    layers = [linear(model, path) for path in group]
    rank, out = found["lora_A"].shape[0], sum(layer.out_features for layer in layers)
    shapes = {"lora_A": (rank, layers[0].in_features), "lora_B": (out, rank), "lora_magnitude_vector": (out,)}
    for part, tensor in found.items():
        if tensor.shape != shapes[part]:
            raise CheckpointError(
                f"{file}: {part} of {module!r} has shape {tensor.shape}, and this model asks for {shapes[part]}; "
                "the adapter was made for another base"
            )
    said = _by_pattern(config["rank_pattern"], module, settings.rank)
    if said != rank:
        raise CheckpointError(f"{file}: {module!r} has rank {rank}, and {CONFIG} says {said}")
    alpha = _by_pattern(config["alpha_pattern"], module, settings.alpha)
    op = names.rules[f"{module}.weight"].op
    a = nn.Parameter(_like(found["lora_A"].load(), layers[0]))
    bs = _split(op, found["lora_B"].load())
    magnitudes: Sequence[Tensor | None] = [None] * len(layers)
    if settings.dora:
        magnitudes = [part[:, 0] for part in _split(op, found["lora_magnitude_vector"].load()[:, None])]
    out_layers = {}
    for path, layer, b, length in zip(group, layers, bs, magnitudes, strict=True):
        magnitude = None if length is None else nn.Parameter(_like(length, layer))
        out_layers[path] = make_adapter(
            layer, a, nn.Parameter(_like(b, layer)), settings, alpha=alpha, magnitude=magnitude
        )
    return out_layers


def _like(tensor: Tensor, layer: nn.Linear) -> Tensor:
    return tensor.to(dtype=adapter_dtype(layer), device=layer.weight.device, copy=True).contiguous()


def _read_full(model: Model, names: Names, full: Mapping[str, StoredTensor]) -> dict[str, nn.Module]:
    """Copies of the layers that were trained in full. What is tied in the model and the same in the file stays tied."""
    values: dict[str, Tensor] = {}
    for key, tensor in full.items():
        rule = names.rules.get(key)
        if rule is None:
            raise CheckpointError(f"{tensor.file}: {_no(key, 'tensor', names.rules)}")
        for ours, part in zip(rule.ours, rule.op.load(tensor.load()), strict=True):
            expected = tuple(model.get_parameter(ours).shape)
            if tuple(part.shape) != expected:
                raise CheckpointError(
                    f"{tensor.file}: {key!r} has shape {tensor.shape}, and {ours!r} of this model has {expected}; "
                    "the adapter was made for another base"
                )
            values[ours] = part
    copies = make_copies(model, sorted({ours.rpartition(".")[0] for ours in values}), tied=False)
    first: dict[int, nn.Parameter] = {}
    for ours, value in values.items():
        path, _, key = ours.rpartition(".")
        copies[path].get_parameter(key).data.copy_(value)
        same = first.setdefault(id(model.get_parameter(ours)), copies[path].get_parameter(key))
        if torch.equal(same, copies[path].get_parameter(key)):
            copies[path].register_parameter(key, same)
    return copies


def _no(name: str, what: str, known: Iterable[str]) -> str:
    near = unknown(what, name, sorted(known)).partition(" (known")[0]
    return f"{near}; the adapter was made for another base"


def _same_base(config: dict[str, Any], model: Model) -> None:
    said, have = config.get("base_model_name_or_path"), model.source
    if isinstance(said, str) and said and have and Path(said).name != Path(have).name:
        warnings.warn(f"the adapter says it was made for {said!r}; the model is {have!r}", stacklevel=3)
