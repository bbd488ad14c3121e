"""Small models of every family, and random configurations over all mechanisms."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import torch

import sublayer
from sublayer.config import ACTIVATIONS, NORMS, PLACEMENTS, POSITIONS, ModelConfig, RotaryScaling

FAMILIES = (
    "original-base",
    "bert-base",
    "gpt2",
    "llama-7b",
    "llama-3.1-8b",
    "mistral-7b",
    "qwen3-0.6b",
    "t5-base",
    "flan-t5-base",
    "bart-base",
    "opus-mt-en-de",
    "vit-b-16",
)
TEXT_FAMILIES = tuple(name for name in FAMILIES if not name.startswith("vit"))
CAUSAL_FAMILIES = tuple(name for name in TEXT_FAMILIES if name != "bert-base")
VOCAB = 61


def seeded(seed: int) -> torch.Generator:
    """A generator where the tests run."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def small(name: str, **changes: Any) -> ModelConfig:
    """A preset with all its choices and none of its size. Dropout is off, so that a pass is a function."""
    config = sublayer.preset(name)
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 48, "num_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
    sizes |= {"ffn_dropout": 0.0, "head_dim": None if config.head_dim is None else 12}
    sizes |= {"num_kv_heads": None if config.num_kv_heads is None else 2}
    sizes |= {"num_encoder_layers": 2} if config.num_encoder_layers else {}
    sizes |= {"num_decoder_layers": 2} if config.num_decoder_layers else {}
    sizes |= {"window": 5} if config.window else {}
    if config.image_input:
        sizes |= {"image_size": 24, "patch_size": 8, "num_labels": 5}
    else:
        sizes |= {"vocab_size": VOCAB, "max_positions": 48, "relative_max_distance": 40}
        sizes |= {key: 0 for key in ("pad_id", "bos_id", "start_id") if getattr(config, key) is not None}
    if config.eos_id is not None:
        sizes["eos_id"] = 1
    return dataclasses.replace(config, **(sizes | changes))


def model_of(config: ModelConfig, seed: int = 0) -> Any:
    """A model in evaluation mode whose norms, biases and statistics are random too, so that none is a hidden 1 or 0."""
    model = sublayer.build(config, seed=seed).eval()
    generator = torch.Generator(model.device).manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, device=tensor.device)
                tensor.add_(noise * 0.2 if "running" in name else (noise - 0.5) * 0.2)
    return model


def random_ids(*shape: int, seed: int = 0, low: int = 2) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randint(low, VOCAB, shape, generator=generator)


def example(config: ModelConfig, batch: int = 2, length: int = 7, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The positional inputs of a model of this configuration."""
    if config.image_input:
        return (torch.rand(batch, config.num_channels, config.image_size, config.image_size),)
    ids = random_ids(batch, length, seed=seed)
    return (ids, random_ids(batch, length, seed=seed + 1)) if config.shape == "encoder-decoder" else (ids,)


SCALINGS = st.sampled_from(
    [
        None,
        RotaryScaling(kind="linear", factor=4.0),
        RotaryScaling(kind="dynamic", factor=2.0),
        RotaryScaling(kind="yarn", factor=4.0, original_max_positions=16),
        RotaryScaling(kind="llama3", factor=8.0, original_max_positions=16),
    ]
)


@st.composite
def configs(draw: Any, families: tuple[str, ...] = TEXT_FAMILIES, **fixed: Any) -> ModelConfig:
    """A family, with any mechanism exchanged for any other."""
    name = draw(st.sampled_from(families))
    changes: dict[str, Any] = {
        "norm": draw(st.sampled_from(NORMS)),
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "positions": draw(st.sampled_from(POSITIONS)),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "gated": draw(st.booleans()),
        "ffn_bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "num_kv_heads": draw(st.sampled_from([None, 1, 2, 4])),
        "head_dim": draw(st.sampled_from([None, 4, 12])),
        "window": draw(st.sampled_from([None, None, 1, 3, 6])),
        "final_norm": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "embedding_scale": draw(st.booleans()),
        "rotary_fraction": draw(st.sampled_from([1.0, 0.5])),
        "rotary_scaling": draw(SCALINGS),
        "window_layers": None,
    }
    if sublayer.preset(name).shape == "encoder-decoder":
        changes["share_embeddings"] = draw(st.booleans())
        changes["tie_embeddings"] = draw(st.booleans())
    if changes["norm"] == "none" and changes["placement"] in ("post", "deep"):
        changes["norm"] = "layernorm"  # without any norm these grow from layer to layer, and rounding with them
    if changes["window"] is not None and draw(st.booleans()):
        changes["window_layers"] = (1,)
    if changes["rotary_fraction"] == 0.5 and changes["head_dim"] == 4:
        changes["rotary_fraction"] = 1.0
    return small(name, **(changes | fixed))
