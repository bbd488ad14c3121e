"""Public checkpoints, in and out."""

from .load import load_model
from .save import save_model
from .tensors import CheckpointError

__all__ = ["CheckpointError", "load_model", "save_model"]
