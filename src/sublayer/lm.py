"""A checkpoint as one thing to use: model, tokenizer and configuration together, text in and text out."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from . import lora
from .config import ModelConfig
from .data import Tokenizer
from .data.chat import Message, find_template, render, special_tokens
from .generation.answer import Answer
from .generation.constraint import constrained
from .generation.generate import make_options, search, stream
from .generation.options import Options
from .generation.session import check, start_of
from .hub import load_model, save_model
from .hub.download import resolve
from .hub.heads import under_head_of
from .hub.tensors import read_json
from .hub.tokenizer import load_tokenizer
from .lora.peft import base_of
from .models import Decoder, Encoder, EncoderDecoder, Model

# What a folder says beside the model and its tokenizer: where answers end, and how sentences are pooled.
KEPT = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json",
)  # fmt: skip
USUAL, USUAL_CHAT = 128, 512  # new tokens of an answer at most, where nobody says how many


def load(
    folder: str | os.PathLike[str], device: torch.device | str | None = None, dtype: torch.dtype | str | None = None,
    *, bits: int | None = None,
) -> LM:  # fmt: skip
    """The model of a folder, of a GGUF file or of a name on the hub, with its tokenizer.

    The folder of an adapter will do, if it names a base that is here. `bits` holds the weights in 4 bits, or in 8.
    """
    base = base_of(folder)
    if base is not None:
        lm = load(base, device if bits is None else "cpu", dtype)
        lm.model = under_head_of(lm.model, Path(folder))
        if bits is not None:
            lora.quantize(lm.model, bits, device=device or torch.get_default_device())
        lora.load(lm.model, folder)
        return lm
    path = resolve(folder)
    model = load_model(path, device, dtype, bits=bits)
    return LM(model, load_tokenizer(path), None if path.suffix == ".gguf" else path)


@dataclass(frozen=True, kw_only=True)
class Detail:
    """An answer with what is known about it. Probabilities are the model's own, before temperature and penalties."""

    ids: list[int]  # the token that ended it included
    text: str
    finish_reason: str  # "stop": it came to an end, or to a stop string; "length": there was no room for more
    logprobs: list[float] = field(default_factory=list)  # of each id
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # in each place the likeliest ids, best first


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
    def generate(self, text: str, *, max_new_tokens: int | None = ..., **options: Any) -> str: ...
    @overload
    def generate(self, text: list[str], *, max_new_tokens: int | None = ..., **options: Any) -> list[str]: ...
    def generate(self, text: str | list[str], *, max_new_tokens: int | None = None, **options: Any) -> str | list[str]:
        """What the model says next, or, for an encoder-decoder, its answer to the source; a list gives a list.

        The answer ends before the first of the strings `stop`, if it comes to one, or after `max_new_tokens`: unless
        told otherwise 128, or as many as the model has room for. The other options are those of `sublayer.generate`:
        num_beams, temperature, top_p, seed …; and one of json_schema (or True), regex and grammar binds the answer.
        """
        prompts = self.tokenizer.encode_batch([text] if isinstance(text, str) else text)
        texts = [answer.text for answer in self._answers(prompts, max_new_tokens=max_new_tokens, **options)]
        return texts[0] if isinstance(text, str) else texts

    def stream(self, text: str, *, max_new_tokens: int | None = None, **options: Any) -> Iterator[str]:
        """The same text as `generate`, in pieces as they come, never half a character. Beams come in one piece."""
        yield from self._pieces(self.tokenizer.encode(text), max_new_tokens=max_new_tokens, **options)

    def generate_details(
        self, text: str | list[str], *, top: int | None = 0, max_new_tokens: int | None = None, **options: Any
    ) -> list[Detail]:
        """The answer to each text, with its tokens, their log-probabilities and why it ended.

        `top` asks for the likeliest tokens in each place too; None leaves all probabilities out, which saves reading
        each answer once more.
        """
        prompts = self.tokenizer.encode_batch([text] if isinstance(text, str) else text)
        return self._details(prompts, top, max_new_tokens=max_new_tokens, **options)

    def chat(
        self, messages: Sequence[Message], *, tools: Any = None, max_new_tokens: int | None = None, **options: Any
    ) -> str:
        """The answer to a conversation [{"role": "user", "content": "…"}, …], put as the checkpoint's template says."""
        prompt = self._conversation(messages, tools)
        return self._answers([prompt], USUAL_CHAT, max_new_tokens=max_new_tokens, **options)[0].text

    def stream_chat(
        self, messages: Sequence[Message], *, tools: Any = None, max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[str]:
        """The same text as `chat`, in pieces as they come."""
        yield from self._pieces(
            self._conversation(messages, tools), USUAL_CHAT, max_new_tokens=max_new_tokens, **options
        )

    def chat_details(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        top: int | None = 0,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> Detail:
        """The same text as `chat`, with what `generate_details` tells."""
        prompt = self._conversation(messages, tools)
        return self._details([prompt], top, usual=USUAL_CHAT, max_new_tokens=max_new_tokens, **options)[0]

    def chat_prompt(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model reads."""
        settings = self.tokenizer.settings
        template = find_template(settings, self.tokenizer.folder, tools=bool(tools))
        if template is None:
            raise ValueError(
                f"{self.folder or 'the model'} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); it was not made for conversations: use generate"
            )
        return render(
            template, messages, special=special_tokens(settings), add_generation_prompt=add_generation_prompt,
            tools=tools or None,
        )  # fmt: skip

    @torch.inference_mode()
    def logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], top: int = 0, start_id: int | None = None
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """How likely the model finds each token of an answer after those before, and the `top` likeliest instead."""
        ids = torch.tensor([[*prompt]], device=self.model.device)
        check(self.model, ids, None)
        said = torch.tensor([*answer], device=self.model.device)
        if isinstance(self.model, Decoder):
            features = self.model.features(torch.cat([ids[0], said[:-1]])[None])[0, len(prompt) - 1 :]
        else:
            assert isinstance(self.model, EncoderDecoder)
            first = said.new_tensor([start_of(self.config, start_id)])
            features = self.model.features(ids, torch.cat([first, said[:-1]])[None])[0]
        if not 0 <= top <= self.config.output_vocab_size:
            raise ValueError(f"top is {top}; it must be between 0 and the {self.config.output_vocab_size} tokens")
        values: list[float] = []
        best: list[list[tuple[int, float]]] = []
        for start in range(0, len(said), 256):  # never all the logits at once
            scores = self.model.head(features[start : start + 256]).float().log_softmax(-1)
            values += scores.gather(-1, said[start : start + 256, None])[:, 0].tolist()
            highest = scores.topk(top) if top else None
            rows = [] if highest is None else zip(highest.indices.tolist(), highest.values.tolist(), strict=True)
            best += [list(zip(*row, strict=True)) for row in rows]
        return values, best

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
        return self._padded(self.tokenizer.encode_batch(texts))

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        if not rows or not all(rows):
            raise ValueError("nothing to read: a text has no tokens")
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return ids.to(self.model.device), mask.to(self.model.device)

    def _conversation(self, messages: Sequence[Message], tools: Any) -> list[int]:
        # The template itself writes what stands around a text.
        return self.tokenizer.encode(self.chat_prompt(messages, tools=tools), special=False)

    def _details(self, prompts: list[list[int]], top: int | None, **options: Any) -> list[Detail]:
        out = []
        for prompt, answer in zip(prompts, self._answers(prompts, **options), strict=True):
            more: dict[str, Any] = {}
            if top is not None:
                values, best = self.logprobs(prompt, answer.ids, top, options.get("start_id"))
                more = dict(logprobs=values, top=best)
            reason = answer.reason or "length"
            out.append(Detail(ids=answer.ids, text=answer.text, finish_reason=reason, **more))
        return out

    def _answers(self, prompts: list[list[int]], usual: int = USUAL, **options: Any) -> list[_Answer]:
        chosen, stops = self._options(prompts, usual, options)
        answers = [_Answer(self.tokenizer, chosen.eos_id, stops, shown=False) for _ in prompts]
        with closing(self._steps(prompts, chosen)) as steps:
            for tokens in steps:
                for answer, token in zip(answers, tokens, strict=True):
                    answer.add(token)
                if all(answer.reason for answer in answers):
                    break
        for answer in answers:
            answer.finish()
        return answers

    def _pieces(self, prompt: list[int], usual: int = USUAL, **options: Any) -> Iterator[str]:
        chosen, stops = self._options([prompt], usual, options)
        answer = _Answer(self.tokenizer, chosen.eos_id, stops, shown=chosen.num_beams == 1)
        with closing(self._steps([prompt], chosen)) as steps:
            for tokens in steps:
                piece = answer.add(tokens[0])
                if piece and chosen.num_beams == 1:
                    yield piece
                if answer.reason:
                    break
        rest = answer.finish()
        rest = rest if chosen.num_beams == 1 else answer.text
        if rest:
            yield rest

    def _steps(self, prompts: list[list[int]], options: Options) -> Generator[list[int], None, None]:
        """The next token of each answer, step by step; what fills a row after its end means nothing."""
        ids, mask = self._padded(prompts)
        if options.num_beams > 1:
            yield from search(self.model, ids, options, mask=mask).tokens[:, 0].T.tolist()
            return
        for tokens in stream(self.model, ids, options, mask=mask):
            yield tokens.tolist()

    def _options(self, prompts: list[list[int]], usual: int, options: dict[str, Any]) -> tuple[Options, list[str]]:
        """The options of generation, and the strings that end an answer."""
        if options.get("max_new_tokens") is None:
            read = max(map(len, prompts), default=0) if self.config.shape == "decoder" else 0
            options["max_new_tokens"] = max(1, min(usual, self.config.max_positions - read))
        stop = options.pop("stop", None) or []
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or not all(isinstance(one, str) and one for one in stops):
            raise ValueError(f"stop is {stop!r}; expected a string, or a list of strings, none of them empty")
        # A special token is no part of any text: where one is named, its id ends the answer.
        named = {one: self.tokenizer.id_of(one) for one in stops}
        special = {one: number for one, number in named.items() if number in self.tokenizer.special_ids()}
        ends = _ends(options.get("eos_id")) or self.eos_id
        options["eos_id"] = (*ends, *_ends(list(special.values())))
        if isinstance(options.get("draft"), LM):
            options["draft"] = self._draft(options["draft"])
        return make_options(**constrained(self.tokenizer, options)), [one for one in stops if one not in special]

    def _draft(self, lm: LM) -> Model:
        """The model of another checkpoint, whose tokens must mean the same."""
        if lm.tokenizer.backend.get_vocab() != self.tokenizer.backend.get_vocab():
            raise ValueError(f"the draft {lm.folder or ''} has another vocabulary; it must be the model's own")
        return lm.model

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


class _Answer:
    """One answer as it grows: its tokens, its text, and why it ended."""

    def __init__(self, tokenizer: Tokenizer, ends: Any, stops: list[str], *, shown: bool) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        # Without strings to look for, and nobody who watches, the text is read once, at the end.
        self.parts = Answer(tokenizer, stops) if shown or stops else None
        self.ids: list[int] = []
        self.text = self.reason = ""

    def add(self, token: int) -> str:
        """What becomes sure with one more token."""
        if self.reason:
            return ""
        self.ids.append(token)
        if token in self.ends:
            self.reason = "stop"
        if self.parts is None:
            return ""
        piece = self.parts.add(token)[0]
        return self._more(piece + self.parts.finish()[0] if self.reason else piece)

    def finish(self) -> str:
        """What is sure when no more tokens come."""
        if self.parts is None:
            return self._more(self.tokenizer.decode(self.ids))
        return "" if self.reason else self._more(self.parts.finish()[0])

    def _more(self, text: str) -> str:
        if self.parts is not None and self.parts.stopped:
            self.reason = "stop"
        self.text += text
        return text
