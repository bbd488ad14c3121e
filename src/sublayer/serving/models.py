"""From the folders that are to be served to engines. Adapters of one base share its engine, and the batches there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .. import lora
from ..hub.download import resolve
from ..hub.heads import under_head_of
from ..lm import load
from ..lora.peft import base_of
from .engine import Engine, Limits, make_engine
from .metrics import Metrics


def load_engines(
    models: Mapping[str, str], limits: Limits, metrics: Metrics, device: str | None = None, dtype: str | None = None
) -> dict[str, Engine]:
    """The engine that answers for each name."""
    bases = {name: base_of(folder) for name, folder in models.items()}
    engines: dict[str, Engine] = {}
    shared: dict[Path, Engine] = {}
    for name, folder in models.items():
        if bases[name] is None:
            engines[name] = make_engine(name, load(folder, device, dtype), limits, metrics)
            shared.setdefault(resolve(folder).resolve(), engines[name])
    for name, base in bases.items():
        if base is None:
            continue
        path = resolve(base).resolve()
        if path not in shared:
            shared[path] = make_engine(name, load(base, device, dtype), limits, metrics)
        engines[name] = shared[path]
        if not _shares(shared[path], name, Path(models[name])):
            engines[name] = make_engine(name, load(models[name], device, dtype), limits, metrics)
    return {name: engines[name] for name in models}


def _shares(engine: Engine, name: str, folder: Path) -> bool:
    """Put an adapter beside its base, unless it needs another head."""
    model = engine.lm.model
    if under_head_of(model, folder) is not model:
        return False
    engine.adapters[name] = f"adapter{len(engine.adapters)}"
    lora.load(model, folder, name=engine.adapters[name])
    lora.use(model, None)
    return True
