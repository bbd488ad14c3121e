"""Tokenizers of every kind, trained on a little text, and random models over them."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sublayer.data import Tokenizer
from sublayer.lm import LM
from support import model_of, small

TEXTS = [
    '{"name": "Ann", "age": 31, "tags": ["a", "b c"], "on": true, "off": false, "none": null}',
    'the quick brown fox said: "yes or no", 12.5 + (7 - 3) = -0.5 é 今天天气; abc [x] {y}',
]
KINDS = ("bytes", "bpe", "sentencepiece", "metaspace", "wordpiece", "words")
SPECIAL = ["<pad>", "<end>", "<unk>"]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Ids 0, 1 and 2 are padding, the end, and what is unknown."""
    special: dict[str, Any] = dict(special_tokens=SPECIAL, show_progress=False)
    trainer: Any
    if kind in ("bytes", "bpe"):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=259 if kind == "bytes" else 330, initial_alphabet=letters, **special)
    elif kind == "sentencepiece":
        backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + names, show_progress=False)
    elif kind == "metaspace":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", **special)
    elif kind == "wordpiece":
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, **special)
    else:
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=200, **special)
    backend.train_from_iterator(TEXTS * 3, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]  # bytes are plain tokens
    settings = {"eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), settings)


@functools.cache
def lm_of(kind: str, preset: str = "llama-2-7b", spare: int = 5, **changes: Any) -> LM:
    """A random model with more tokens than its tokenizer."""
    tokenizer = tokenizer_of(kind)
    sizes = dict(vocab_size=tokenizer.vocab_size + spare, eos_id=1, max_positions=1200)
    return LM(model_of(small(preset, **(sizes | changes))), tokenizer)
