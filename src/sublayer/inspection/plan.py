"""What a model will need, from its configuration alone: nothing is allocated, and nothing is run.

Training is as `sublayer train` and `sublayer finetune` do it: what learns is in float32, what stands beside an adapter
in `dtype`, products in `dtype`, fused attention, and the logits of a chunk of tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import ModelConfig, unknown
from ..core.layers import Linear
from ..models import build, parse_dtype
from ..models.flops import flops

LOGITS = 1 << 29  # that the loss holds at once on a GPU
STATES = {"adamw": 8, "muon": 4, "adafactor": 0}  # bytes for each number that learns
# Bytes of a weight in so many bits, with its share of the scales: of 64 weights in 8 bits, of 16,384 in 32.
CODED = {4: 1 / 2 + 1 / 64 + 4 / 16384, 8: 1.0}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Of one process, at the peak of a step."""

    parameters: int
    trainable: int
    flops_per_token: float  # forward, and in training backward; what is computed a second time is not counted
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    kv_cache_bytes: int  # of as many tokens, if they were generated
    total_bytes: int


def plan(
    config: ModelConfig,
    *,
    batch: int = 1,
    seq: int | None = None,
    dtype: torch.dtype | str = "bfloat16",
    optimizer: str | None = "adamw",
    lora_rank: int | None = None,
    bits: int | None = None,
    recompute: bool = False,
    shards: int = 1,
) -> Plan:
    """For training on `batch` sequences of `seq` tokens a step (None: as many as the model has positions), all weights
    or an adapter; with `optimizer` None, for generating them. `bits` holds weights that only stand in 4 or 8 bits;
    `shards` processes share weights, gradients and the optimiser's state."""
    for name, value in (("batch", batch), ("seq", seq), ("shards", shards), ("lora_rank", lora_rank)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if optimizer is not None and optimizer not in STATES:
        raise ValueError(unknown("optimizer", optimizer, tuple(STATES)))
    if bits is not None and bits not in CODED:
        raise ValueError(f"bits is {bits}; weights can be held in 4 bits or in 8")
    if bits is not None and optimizer is not None and lora_rank is None:
        raise ValueError("weights held in few bits do not learn; give lora_rank, or optimizer=None")
    seq, item = seq or _positions(config), (parse_dtype(dtype) or torch.float32).itemsize
    model = build(config, device="meta")
    layers = [part for name, part in model.named_modules() if type(part) is Linear and ".blocks." in name]
    count, coded = model.num_parameters(), sum(part.weight.numel() for part in layers) if bits else 0
    adapter = (lora_rank or 0) * sum(part.in_features + part.out_features for part in layers)
    learns = 0 if optimizer is None else adapter or count
    stands = (count - coded) * item + coded * CODED[bits or 8]
    weights = 4.0 * count if learns == count else stands + 4.0 * adapter
    gradients, states = 4.0 * learns, STATES.get(optimizer or "", 0) * float(learns)
    step = Step(config, batch * seq, item, 4 if learns == count else item)
    activations = step.generating(batch) if optimizer is None else step.training(recompute)
    cache = 2 * item * config.num_decoder_layers * config.kv_heads * config.head_size * batch * seq
    weights, gradients, states = weights / shards, gradients / shards, states / shards
    # Gradients come as activations go; but for what is new in a block, both are never there at once.
    work = activations + cache if optimizer is None else max(activations, gradients)
    sides = dict.fromkeys(("source", "target"), seq)
    work_of_token = flops(model, config, sides, {side: float(seq) for side in sides}) / seq
    share = 1 / 3 if optimizer is None else 2 / 3 if adapter else 1.0  # what stands needs no gradient of its own
    return Plan(
        parameters=count, trainable=learns, flops_per_token=work_of_token * share, weights_bytes=round(weights),
        gradients_bytes=round(gradients), optimizer_bytes=round(states), activations_bytes=round(activations),
        kv_cache_bytes=cache, total_bytes=round(weights + states + work),
    )  # fmt: skip


def _positions(config: ModelConfig) -> int:
    """Tokens of the longest sequence; of an image, its patches and the class token."""
    if config.image_size is None or config.patch_size is None:
        return config.max_positions
    return (config.image_size // config.patch_size) ** 2 + 1


@dataclass(frozen=True)
class Step:
    """Bytes that a step keeps until its backward pass has used them."""

    config: ModelConfig
    tokens: int
    item: int  # of a product's result
    stream: int  # of a number between sublayers: float32 where the weights are

    def training(self, recompute: bool) -> float:
        config = self.config
        depth = config.num_encoder_layers + config.num_decoder_layers
        block = self.tokens * max(self._block("encoder"), self._block("decoder"))
        if recompute:  # what goes into each block, and one block at a time
            return depth * self.tokens * config.d_model * self.stream + max(block, self._loss())
        blocks = sum(config.layers(side) * self._block(side) for side in ("encoder", "decoder"))
        return self.tokens * blocks + self._loss()

    def generating(self, batch: int) -> float:
        """One token a row: little but its logits, in float32 beside their own type."""
        return batch * float(self.config.output_vocab_size * (self.item + 8) + 8 * self.config.d_ff * self.item)

    def _block(self, side: str) -> float:
        """For one token of a block."""
        config, item = self.config, self.item
        if not config.layers(side):
            return 0.0
        out = self._attention(rotary=config.positions == "rotary") + self._sublayer()
        out += item * config.d_ff * (4 if config.gated else 2)
        if side == "decoder" and config.shape == "encoder-decoder":
            out += self._attention(rotary=False)
        return out

    def _attention(self, rotary: bool) -> float:
        config = self.config
        queries, keys = config.num_heads * config.head_size, config.kv_heads * config.head_size
        made = 2 * queries + 2 * keys + (queries + keys if rotary else 0)
        return self._sublayer() + self.item * made + 4 * config.num_heads  # a logarithm of each head's sum

    def _sublayer(self) -> float:
        """What goes into the norm, what comes out in the type of products, and which numbers dropout left."""
        config = self.config
        read = 4 if config.norm == "layernorm" else self.stream  # autocast has a GPU's LayerNorm read float32
        return config.d_model * (read + self.item + (config.dropout > 0))

    def _loss(self) -> float:
        """The logits of a chunk, as they are and as probabilities; the matrix in the type of the product."""
        config = self.config
        if config.head not in ("lm", "mlm"):
            return 0.0
        size = config.output_vocab_size
        rows = min(self.tokens, max(64, LOGITS // size))
        each = self.item if self.item == 4 else self.item + 8
        matrix = size * config.d_model * self.item if self.stream != self.item else 0
        return float(rows * size * each + matrix + 3 * self.tokens * config.d_model * self.item)
