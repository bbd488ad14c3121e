"""A checkpoint as one thing to use: model, tokenizer and configuration together, text in and text out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from .config import ModelConfig
from .data import Tokenizer
from .generation import generate
from .generation.generate import stream
from .hub import load_model, save_model
from .hub.download import resolve
from .hub.tensors import read_json
from .models import Model


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

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def save(self, folder: str | os.PathLike[str], **options: Any) -> None:
        save_model(self.model, folder, **options)
        self.tokenizer.save(Path(folder))

    @overload
    def generate(self, text: str, *, max_new_tokens: int = ..., **options: Any) -> str: ...
    @overload
    def generate(self, text: list[str], *, max_new_tokens: int = ..., **options: Any) -> list[str]: ...
    def generate(self, text: str | list[str], *, max_new_tokens: int = 128, **options: Any) -> str | list[str]:
        """What the model says next, or, for an encoder-decoder, its answer to the source; a list gives a list."""
        ids, mask = self._batch([text] if isinstance(text, str) else text)
        new = generate(self.model, ids, mask=mask, max_new_tokens=max_new_tokens, **options)
        texts = [self.tokenizer.decode(row) for row in new.tolist()]
        return texts[0] if isinstance(text, str) else texts

    def stream(self, text: str, *, max_new_tokens: int = 128, **options: Any) -> Iterator[str]:
        """The same text as `generate`, in pieces as they come, never half a character."""
        ids, mask = self._batch([text])
        said: list[int] = []
        shown = ""
        for token in stream(self.model, ids, mask=mask, max_new_tokens=max_new_tokens, **options):
            said.append(int(token[0]))
            whole = self.tokenizer.decode(said)
            if not whole.endswith("�"):  # the bytes of a character may come in several tokens
                yield whole[len(shown) :]
                shown = whole
        rest = self.tokenizer.decode(said)[len(shown) :]
        if rest:
            yield rest

    @torch.inference_mode()
    def embed(self, texts: str | list[str]) -> Tensor:
        """(B, D): one vector of length 1 for each text, pooled as the checkpoint says, or the mean of its tokens."""
        self._need("encoder")
        ids, mask = self._batch([texts] if isinstance(texts, str) else texts)
        features = self.model.features(ids, mask=mask)  # type: ignore[operator]
        pooling = self.folder / "1_Pooling" / "config.json" if self.folder else None
        first = pooling is not None and pooling.exists() and read_json(pooling).get("pooling_mode_cls_token") is True
        real = mask[..., None].to(features.dtype)
        pooled = features[:, 0] if first else (features * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(pooled.float(), dim=-1)

    @torch.inference_mode()
    def fill(self, text: str, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest tokens for the mask in a text, each with its probability."""
        self._need("mlm")
        token = self.tokenizer.special("mask")
        ids, mask = self._batch([text])
        places = torch.eq(ids[0], -1 if token is None else token).nonzero()
        if token is None or len(places) != 1:
            name = None if token is None else self.tokenizer.backend.id_to_token(token)
            raise ValueError(f"expected exactly one mask token {name!r} in the text, found {len(places)}")
        best = self.model(ids, mask=mask)[0, places[0, 0]].float().softmax(-1).topk(top)
        return [
            (self.tokenizer.decode([i]).strip(), p)
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def classify(self, text: str | list[str]) -> dict[str, float] | list[dict[str, float]]:
        """The probability of each label, under the names the checkpoint gives them."""
        self._need("classifier")
        ids, mask = self._batch([text] if isinstance(text, str) else text)
        names = (self.model.origin or {}).get("id2label") or {}
        rows = self.model(ids, mask=mask).float().softmax(-1).tolist()
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

    def _need(self, what: str) -> None:
        config = self.config
        if what == "encoder" and (config.shape != "encoder" or config.image_input):
            raise ValueError(f"embed needs an encoder of text; this model's shape is {config.shape!r}")
        if what != "encoder" and config.head != what:
            raise ValueError(f"this needs a model with head {what!r}; this one has {config.head!r}")
