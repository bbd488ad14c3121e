"""Every family of public checkpoints we read and write, by the model_type of its config.json."""

from __future__ import annotations

from ..family import Family
from .bart import BART, MARIAN
from .bert import BERT, DISTILBERT, ROBERTA
from .gpt2 import GPT2
from .llama import LLAMA, MISTRAL, QWEN2, QWEN3
from .t5 import MT5, T5
from .vit import VIT

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (BERT, ROBERTA, DISTILBERT, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, T5, MT5, BART, MARIAN, VIT)
}
