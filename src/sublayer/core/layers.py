"""torch's own layers, without initial values: those are a family's choice, and `models/build.py` draws them.

Drawing them here would cost time for every layer of a model that is about to be loaded, and on the meta device torch
imports its whole compiler to draw nothing.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass
