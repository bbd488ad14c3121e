"""From logits to text."""

from .generate import generate

__all__ = ["generate"]
