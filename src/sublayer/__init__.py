"""sublayer: one small core from which every Transformer in use is made by configuration."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import ModelConfig, RotaryScaling
from .presets import preset, presets

if TYPE_CHECKING:
    from . import lora as lora
    from .core.cache import Cache as Cache
    from .core.layout import Packing as Packing
    from .generation import generate as generate
    from .hub import load_model as load_model
    from .hub import save_model as save_model
    from .inspection import plan as plan
    from .lm import load as load
    from .models import build as build

__version__ = "0.1.0"

# Loaded on first use, so that `import sublayer` stays light.
_LAZY = {
    "Cache": ".core.cache",
    "Packing": ".core.layout",
    "build": ".models",
    "generate": ".generation",
    "load": ".lm",
    "load_model": ".hub",
    "lora": ".lora",
    "plan": ".inspection",
    "save_model": ".hub",
}
__all__ = ["ModelConfig", "RotaryScaling", "preset", "presets", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sublayer' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name], __name__)
    value = module if _LAZY[name] == f".{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
