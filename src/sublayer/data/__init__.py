"""Text and ids."""

from .tokenizer import Tokenizer

__all__ = ["Tokenizer"]
