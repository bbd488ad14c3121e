"""torch's own layers, which on the meta device draw no initial values.

A model is built there, and its values come from a checkpoint or from `models/build.py`. Drawing them would cost time in
every layer, and torch imports its whole compiler to draw nothing.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()
