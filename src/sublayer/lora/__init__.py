"""LoRA: small adapters around the layers of a frozen model, in PEFT's format."""

from .manage import Summary, add, merge, names, remove, rows, summary, unmerge, use
from .peft import load, save
from .quantize import quantize

__all__ = [
    "Summary", "add", "load", "merge", "names", "quantize", "remove", "rows", "save", "summary", "unmerge", "use",
]  # fmt: skip
