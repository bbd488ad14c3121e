"""Embeddings, N blocks and the final norm: one side of a Transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..config import ModelConfig
from .block import Block
from .cache import Cache
from .embeddings import PatchEmbeddings, TokenEmbeddings
from .layout import Layout
from .masks import cross_mask, self_mask
from .norm import NoNorm, make_norm
from .positions import Rotary, position_bias


class Stack(nn.Module):
    one_token: Callable[..., Tensor] | None = None  # a block compiled for one token a row, while a GPU generates

    def __init__(self, config: ModelConfig, side: str) -> None:
        super().__init__()
        self.causal = side == "decoder"
        vocab_size = config.output_vocab_size if self.causal else config.vocab_size
        self.embeddings: Any = PatchEmbeddings(config) if config.image_input else TokenEmbeddings(config, vocab_size)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.bias = position_bias(config, self.causal)
        self.blocks = nn.ModuleList(Block(config, side) for _ in range(config.layers(side)))
        self.final_norm = make_norm(config) if config.final_norm else NoNorm()
        self.windows = config.windows(side)
        self.needs_all = config.norm == "batchnorm"  # whose statistics are over all tokens

    def forward(
        self,
        inputs: Tensor,
        layout: Layout | None = None,
        *,
        token_types: Tensor | None = None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        cache: Cache | None = None,
        first: bool = False,
    ) -> Tensor:
        """`first` says that the first token of each row is all that is wanted: (B, 1, D), where that saves work."""
        x = self.embeddings(inputs, layout, token_types)  # (B, T, D) or (N, D)
        layout = layout or Layout.of(x)
        rotary = None if self.rotary is None else self.rotary(layout)
        places = {window: None if cache is None else cache.places(layout, window) for window in set(self.windows)}
        masks = {
            window: self_mask(layout, causal=self.causal, window=window, bias=self.bias, places=held)
            for window, held in places.items()
        }
        memory_mask = None if memory_layout is None else cross_mask(layout, memory_layout)
        if cache is not None and x.is_cuda:
            masks = {window: mask.added(x.dtype) for window, mask in masks.items()}
            memory_mask = None if memory_mask is None else memory_mask.added(x.dtype)
        entries = [None] * len(self.blocks) if cache is None else cache.entries(layout)
        crosses = [None] * len(self.blocks) if cache is None else cache.cross
        run = self.one_token if cache is not None and inputs.size(-1) == 1 else None
        only = len(self.blocks) - 1 if first and self._can_answer_first(layout) else -1
        for number, (block, window, entry, cross) in enumerate(
            zip(self.blocks, self.windows, entries, crosses, strict=True)
        ):
            inner = (layout.valid, masks[window], rotary, entry, memory, memory_mask, cross, number == only)
            x = block(x, *inner) if run is None else run(block, x, *inner)
        if cache is not None:
            cache.advance(layout)
        return self.final_norm(x, layout.valid)

    def _can_answer_first(self, layout: Layout) -> bool:
        """Whether the last block can: rows of one sequence each, and nothing in it that depends on places."""
        places = self.causal or self.rotary is not None or self.bias is not None or self.windows[-1] is not None
        return layout.packing is None and not places and not self.needs_all
