"""What goes into a stack: tokens or patches of an image, with their positions and segments."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .layers import Dropout, Embedding
from .layout import Layout, may_look
from .norm import NoNorm, make_norm
from .positions import Learned, added_positions


class TokenEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.tokens = Embedding(vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model) if config.embedding_scale else 1.0
        self.segments = Embedding(config.num_segments, config.d_model) if config.num_segments else None
        self.positions = added_positions(config, config.max_positions, config.position_offset)
        self.max_positions = config.max_positions
        self.norm = make_norm(config) if config.embedding_norm else NoNorm()
        self.dropout = Dropout(config.dropout)

    def forward(self, ids: Tensor, layout: Layout, token_types: Tensor | None = None) -> Tensor:
        check_ids(ids, self.tokens.num_embeddings)
        x = self.tokens(ids) * self.scale if self.scale != 1.0 else self.tokens(ids)  # (..., T, D)
        if self.segments is not None:
            types = torch.zeros_like(ids) if token_types is None else token_types
            check_ids(types, self.segments.num_embeddings, "segment")
            x = x + self.segments(types)
        elif token_types is not None:
            raise ValueError(
                "token_types were given, and this model has no segments (num_segments is 0); leave them out"
            )
        if self.positions is not None:
            self._check_length(layout)
            x = x + self.positions(layout.positions)
        return self.dropout(self.norm(x, layout.valid))

    def _check_length(self, layout: Layout) -> None:
        longest = layout.positions.size(-1) if layout.packing is None else layout.packing.max_length
        if layout.valid is not None and may_look(layout.positions):
            longest = int(layout.positions.max()) + 1  # padding takes no position
        if longest > self.max_positions:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the {self.max_positions} positions of the model; "
                f"cut it to {self.max_positions}, or build the model with a larger max_positions"
            )


def check_ids(ids: Tensor, vocab_size: int, what: str = "token") -> None:
    """A clear error instead of a device-side assertion."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{what} ids are {ids.dtype}; expected whole numbers (torch.long)")
    if not may_look(ids):
        return
    low, high = (int(edge) for edge in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} id {high if high >= vocab_size else low} is outside the vocabulary of {vocab_size}; "
            f"ids go from 0 to {vocab_size - 1}: is this the tokenizer of this model?"
        )


class PatchEmbeddings(nn.Module):
    """Square patches of an image, a class token in front (Dosovitskiy et al. 2020).

    Positions are a grid; an image of another size than trained on gets them interpolated.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.image_size is not None and config.patch_size is not None
        self.patch_size, self.channels = config.patch_size, config.num_channels
        self.grid = config.image_size // config.patch_size
        self.patches = nn.Conv2d(config.num_channels, config.d_model, self.patch_size, self.patch_size)
        self.class_token = nn.Parameter(torch.empty(config.d_model))
        self.positions = added_positions(config, config.num_patches + 1)
        self.norm = make_norm(config) if config.embedding_norm else NoNorm()
        self.dropout = Dropout(config.dropout)

    def forward(self, pixels: Tensor, layout: Layout | None = None, token_types: Tensor | None = None) -> Tensor:
        self._check(pixels)
        patches = self.patches(pixels)  # (B, D, rows, columns)
        rows, columns = patches.shape[-2:]
        x = patches.flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.size(0), 1, -1), x), 1)  # (B, 1 + patches, D)
        if self.positions is not None:
            table = self.positions.weight if isinstance(self.positions, Learned) else self.positions.table
            x = x + self._grid_positions(table, rows, columns)
        return self.dropout(self.norm(x))

    def _grid_positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        if (rows, columns) == (self.grid, self.grid):
            return table
        grid = table[1:].T.reshape(1, -1, self.grid, self.grid)
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((table[:1], grid[0].flatten(1).T))

    def _check(self, pixels: Tensor) -> None:
        if pixels.dim() != 4 or pixels.size(1) != self.channels or any(n % self.patch_size for n in pixels.shape[2:]):
            raise ValueError(
                f"pixels have shape {tuple(pixels.shape)}; expected (batch, {self.channels}, height, width), "
                f"height and width multiples of the patch size {self.patch_size}"
            )
