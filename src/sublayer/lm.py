"""A checkpoint as one thing to use: model, tokenizer and configuration together, text in and text out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from .config import ModelConfig
from .data import Tokenizer
from .generation import generate
from .generation.generate import make_options, stream
from .hub import load_model, save_model
from .hub.download import resolve
from .hub.tensors import read_json
from .models import Encoder, Model

# What a folder says beside the model and its tokenizer: where answers end, and how sentences are pooled.
KEPT = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json",
)  # fmt: skip


def load(
    folder: str | os.PathLike[str], device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
) -> LM:
    """The model of a folder, of a GGUF file or of a name on the hub, with its tokenizer."""
    path = resolve(folder)
    model = load_model(path, device, dtype)
    if path.suffix == ".gguf":
        from .hub.gguf import read_gguf
        from .hub.gguf_tokenizer import tokenizer_from_gguf

        return LM(model, Tokenizer(tokenizer_from_gguf(read_gguf(path).metadata)))
    return LM(model, Tokenizer.load(path), path)


class LM:
    def __init__(self, model: Model, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        if tokenizer.vocab_size > model.config.vocab_size > 0:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.config.vocab_size}; "
                "they do not belong together"
            )
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.eos_id = _ends(model.config.eos_id)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def save(self, folder: str | os.PathLike[str], **options: Any) -> None:
        files = [] if self.folder is None else [(name, self.folder / name) for name in KEPT]
        kept = {name: path.read_bytes() for name, path in files if path.exists()}  # before they are written over
        save_model(self.model, folder, **options)
        self.tokenizer.save(Path(folder))
        for name, content in kept.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)

    @overload
    def generate(self, text: str, *, max_new_tokens: int = ..., **options: Any) -> str: ...
    @overload
    def generate(self, text: list[str], *, max_new_tokens: int = ..., **options: Any) -> list[str]: ...
    def generate(self, text: str | list[str], *, max_new_tokens: int = 128, **options: Any) -> str | list[str]:
        """What the model says next, or, for an encoder-decoder, its answer to the source; a list gives a list."""
        ids, mask = self._batch([text] if isinstance(text, str) else text)
        ends = options["eos_id"] = _ends(options.get("eos_id")) or self.eos_id
        new = generate(self.model, ids, mask=mask, max_new_tokens=max_new_tokens, **options).tolist()
        # What fills a row after its end may be an ordinary token, and is not part of the answer.
        lengths = [next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in new]
        texts = [self.tokenizer.decode(row[:length]) for row, length in zip(new, lengths, strict=True)]
        return texts[0] if isinstance(text, str) else texts

    def stream(self, text: str, *, max_new_tokens: int = 128, **options: Any) -> Iterator[str]:
        """The same text as `generate`, in pieces as they come, never half a character."""
        ids, mask = self._batch([text])
        options["eos_id"] = _ends(options.get("eos_id")) or self.eos_id
        said: list[int] = []
        shown = ""
        for token in stream(self.model, ids, make_options(max_new_tokens=max_new_tokens, **options), mask=mask):
            said.append(int(token[0]))
            whole = self.tokenizer.decode(said)
            # The bytes of a character may come in several tokens, and a token of one byte may be the first of them.
            if len(whole) > len(shown) and not whole.endswith("�") and not self.tokenizer.is_byte(said[-1]):
                yield whole[len(shown) :]
                shown = whole
        rest = self.tokenizer.decode(said)[len(shown) :]
        if rest:
            yield rest

    @torch.inference_mode()
    def embed(self, texts: str | list[str]) -> Tensor:
        """(B, D): one vector of length 1 for each text, pooled as the checkpoint says, or the mean of its tokens."""
        self._need("encoder")
        pooling = self._pooling()
        ids, mask = self._batch([texts] if isinstance(texts, str) else texts)
        assert isinstance(self.model, Encoder)
        features = self.model.features(ids, mask=mask)
        real = mask[..., None].to(features.dtype)
        pooled = features[:, 0] if pooling == "cls" else (features * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(pooled.float(), dim=-1)

    @torch.inference_mode()
    def fill(self, text: str, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest tokens for the mask in a text, each with its probability."""
        self._need("mlm")
        token = self.tokenizer.special("mask")
        if token is None:
            raise ValueError("the tokenizer names no mask token; fill needs one in the text")
        ids, mask = self._batch([text])
        places = torch.eq(ids[0], token).nonzero()
        if len(places) != 1:
            name = self.tokenizer.backend.id_to_token(token)
            raise ValueError(f"expected exactly one mask token {name!r} in the text, found {len(places)}")
        scores = self.model(ids, mask=mask)[0, places[0, 0]].float()
        if not 1 <= top <= scores.numel():
            raise ValueError(f"top is {top}; it must be between 1 and the {scores.numel()} tokens of the model")
        best = scores.softmax(-1).topk(top)
        return [
            (self.tokenizer.decode([i], skip_special=False).strip(), p)
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def classify(self, text: str | list[str]) -> dict[str, float] | list[dict[str, float]]:
        """The probability of each label, under the names the checkpoint gives them.

        They sum to 1, unless the checkpoint says that a text may have several labels at once, or has only one label.
        """
        self._need("classifier")
        ids, mask = self._batch([text] if isinstance(text, str) else text)
        origin = self.model.origin or {}
        names = origin["id2label"] if isinstance(origin.get("id2label"), dict) else {}
        scores = self.model(ids, mask=mask).float()
        apart = origin.get("problem_type") == "multi_label_classification" or scores.size(-1) == 1
        rows = (scores.sigmoid() if apart else scores.softmax(-1)).tolist()
        out = [{str(names.get(str(n), f"LABEL_{n}")): p for n, p in enumerate(row)} for row in rows]
        return out[0] if isinstance(text, str) else out

    def _batch(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        rows = self.tokenizer.encode_batch(texts)
        if not rows or not all(rows):
            raise ValueError("nothing to read: a text has no tokens")
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return ids.to(self.model.device), mask.to(self.model.device)

    def _said(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, if there is one."""
        path = None if self.folder is None else self.folder / name
        return read_json(path) if path is not None and path.exists() else {}

    def _pooling(self) -> str:
        said = self._said("1_Pooling/config.json")
        modes = [
            key.removeprefix("pooling_mode_") for key, on in said.items() if key.startswith("pooling_mode_") and on
        ]
        named = said.get("pooling_mode")  # newer files name it, older ones have a switch for each
        modes = [named] if isinstance(named, str) else modes or ["mean"]
        short = [re.sub(r"_tokens?$", "", mode) for mode in modes]
        if short not in (["mean"], ["cls"]):
            raise ValueError(
                f"{self.folder}: sentences are pooled by {' and '.join(modes)}; supported are mean and cls"
            )
        if self.folder is not None and any(self.folder.glob("[0-9]_Dense")):
            raise ValueError(f"{self.folder} has a dense layer after the pooling, which is not supported")
        return short[0]

    def _need(self, what: str) -> None:
        config = self.config
        if what == "encoder" and (config.shape != "encoder" or config.image_input):
            raise ValueError(f"embed needs an encoder of text; this model's shape is {config.shape!r}")
        if what != "encoder" and config.head != what:
            raise ValueError(f"this needs a model with head {what!r}; this one has {config.head!r}")


def _ends(eos: Any) -> tuple[int, ...]:
    several = eos if isinstance(eos, list | tuple) else [eos]
    return tuple(one for one in several if isinstance(one, int))
