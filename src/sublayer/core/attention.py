"""Multi-head attention: self or cross, with as many key-value heads as the configuration says."""

from __future__ import annotations

from torch import Tensor, nn

from ..config import ModelConfig
from .cache import CrossEntry, Entry
from .kernels import Kernel, fused
from .layers import Linear, product_input
from .masks import Mask
from .norm import NoNorm, RMSNorm
from .positions import rotate


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.scale, self.dropout = config.scale, config.attention_dropout
        width, kv_width = config.num_heads * self.head_size, config.kv_heads * self.head_size
        self.query = Linear(config.d_model, width, bias=config.attention_bias)
        self.key = Linear(config.d_model, kv_width, bias=config.attention_bias)
        self.value = Linear(config.d_model, kv_width, bias=config.attention_bias)
        self.output = Linear(width, config.d_model, bias=config.attention_output_bias)
        self.query_norm = RMSNorm(self.head_size, config.norm_eps) if config.qk_norm else NoNorm()
        self.key_norm = RMSNorm(self.head_size, config.norm_eps) if config.qk_norm else NoNorm()
        self.kernel: Kernel = fused

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Mask | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Entry | CrossEntry | None = None,
    ) -> Tensor:
        x = product_input(x)
        query = self.query_norm(self._split(self.query(x)))  # (..., T, H, E)
        if rotary is not None:
            query = rotate(query, rotary)
        if memory is None and isinstance(cache, CrossEntry):
            key, value = cache.read()
        else:
            key, value = self._key_value(x if memory is None else product_input(memory), rotary, cache)
        dropout = self.dropout if self.training else 0.0
        together = query.size(0) // key.size(0) if isinstance(cache, CrossEntry) else 1
        if together > 1:  # several rows look at one source: they are its queries
            query = query.unflatten(0, (-1, together)).flatten(1, 2)
        query = query.to(key.dtype)  # a cache may be of another
        out = self.kernel(query, key, value, mask or Mask(), scale=self.scale, dropout=dropout)
        return self.output(out.reshape(*x.shape[:-1], -1).to(x.dtype))

    def _key_value(
        self, source: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Entry | CrossEntry | None
    ) -> tuple[Tensor, Tensor]:
        key = self.key_norm(self._split(self.key(source)))  # (..., S, K, E)
        value = self._split(self.value(source))
        if rotary is not None:
            key = rotate(key, rotary)
        return (key, value) if cache is None else cache.write(key, value)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size)
