"""Small random models for the load test, and questions with the answers that they give alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import sublayer
from sublayer.data import Tokenizer
from sublayer.lm import LM

PRESETS = {"gpt": "gpt2", "llama": "llama-2-7b", "pairs": "t5-small", "vectors": "bert-base"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TEXTS = (
    "The quick brown",
    "Paris is the capital of",
    "今天天气 🚀",
    "a",
    "def main(argument: str) -> None:\n",
    "naïve… ",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and what the model says to it when nobody else asks."""

    path: str
    body: dict[str, Any]
    expected: Any


def build(folder: Path) -> dict[str, Path]:
    """A decoder that never ends by itself, one that chats, an encoder-decoder and an encoder, over bytes."""
    alphabet = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<end>"])
    for name, preset in PRESETS.items():
        config = sublayer.preset(preset)
        sizes: dict[str, Any] = dict(d_model=32, d_ff=48, num_heads=4, vocab_size=258, max_positions=600, dropout=0.0)
        sizes |= dict(attention_dropout=0.0, head_dim=None, pad_id=0, bos_id=None, eos_id=None if name == "gpt" else 1)
        sizes |= {"num_encoder_layers": 2} if config.num_encoder_layers else {}
        sizes |= {"num_decoder_layers": 2} if config.num_decoder_layers else {}
        sizes |= {"start_id": 0} if name == "pairs" else {"head": "none"} if name == "vectors" else {}
        model = sublayer.build(dataclasses.replace(config, **sizes), seed=0)
        LM(model, Tokenizer(backend, {"eos_token": "<end>", "pad_token": "<pad>"})).save(folder / name)
    (folder / "llama" / "chat_template.jinja").write_text(TEMPLATE)
    return {name: folder / name for name in PRESETS}


def cases(name: str, lm: LM) -> list[Case]:
    """Greedy and drawn, short and long; a chat where the model has a template for it."""
    if lm.config.shape == "encoder":
        vectors = lm.embed(list(TEXTS)).tolist()
        return [
            Case("/v1/embeddings", {"model": name, "input": text}, vector)
            for text, vector in zip(TEXTS, vectors, strict=True)
        ]
    out = []
    for number, text in enumerate(TEXTS * 2):
        prompt = text * (1 + number % 5)
        options: dict[str, Any] = dict(temperature=0.0) if number % 2 else dict(temperature=0.9, top_p=0.9, seed=number)
        tokens = 4 + 5 * number % 31
        body = {"model": name, "prompt": prompt, "max_tokens": tokens, **options}
        out.append(Case("/v1/completions", body, lm.generate(prompt, max_new_tokens=tokens, **options)))
    try:
        for text in TEXTS[:3]:
            messages = [{"role": "user", "content": text}]
            body = {"model": name, "messages": messages, "max_completion_tokens": 12, "temperature": 0}
            out.append(Case("/v1/chat/completions", body, lm.chat(messages, max_new_tokens=12)))
    except ValueError:  # no template
        pass
    return out
