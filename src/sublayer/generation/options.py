"""How to choose tokens and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import ModelConfig, unknown
from ..models import Model
from . import sampling

LENGTH_FORMS = ("power", "gnmt")

# For the new tokens of each row so far, which tokens may come next: (rows, V) bool, on the CPU.
Allowed = Callable[[list[list[int]]], Tensor]
# That function for one generation, given the tokens that end an answer, and V; `constraint.py` has those of grammars.
Constraint = Callable[[Sequence[int], int], Allowed]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Ids left at None are those of the model's configuration, and of the generation settings it came with."""

    max_new_tokens: int
    num_beams: int = 1
    length_penalty: float = 1.0
    length_form: str = "power"  # Σ log p / n^α; "gnmt": / ((5 + n) / 6)^α
    early_stopping: bool | str = False  # or "never"
    beam_groups: int = 1  # that search apart, each keeping off what those before it say
    diversity_penalty: float = 0.0  # off a token's score, for every time another group says it in the same place
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngrams: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()  # runs of tokens that no text gets, the prompt's end included
    constraint: Constraint | None = None  # it wins where others forbid all that it allows
    forced_first: int | None = None  # the answer begins with this token
    forced_last: int | None = None  # and ends with this one, if nothing else ends it in time
    eos_id: int | Sequence[int] | None = None
    pad_id: int | None = None
    start_id: int | None = None
    seed: int | None = None
    draft: Model | None = None  # a smaller model of the same tokens, whose guesses the model judges
    lookup: bool = False  # guess what followed the same few tokens earlier in the text
    guesses: int = 5  # in one step
    compile: bool = False  # on a GPU: the first answer waits for the compiler, those after it are faster

    def __post_init__(self) -> None:
        for name, fine, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("num_beams", self.num_beams >= 1, "at least 1"),
            ("early_stopping", self.early_stopping in (True, False, "never"), "True, False or 'never'"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            ("typical_p", self.typical_p is None or 0 < self.typical_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 changes nothing)"),
            ("guesses", self.guesses >= 1, "at least 1"),
            ("beam_groups", self.beam_groups >= 1, "at least 1"),
            ("diversity_penalty", self.diversity_penalty >= 0, "0 or more"),
            ("no_repeat_ngrams", self.no_repeat_ngrams >= 0, "0 (off) or the length of a run"),
            ("bad_words", all(self.bad_words), "lists of tokens, none of them empty"),
        ):
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")
        if self.length_form not in LENGTH_FORMS:
            raise ValueError(unknown("length_form", self.length_form, LENGTH_FORMS))
        if self.num_beams > 1 and self.temperature:
            raise ValueError(f"num_beams is {self.num_beams} and temperature {self.temperature}; beams do not sample")
        if self.num_beams % self.beam_groups:
            raise ValueError(f"{self.num_beams} beams do not make {self.beam_groups} groups of the same size")
        if self.diversity_penalty and self.beam_groups == 1:
            raise ValueError(f"diversity_penalty is {self.diversity_penalty}; it needs beam_groups, at least 2")
        if self.guessing and self.num_beams > 1:
            raise ValueError(
                f"num_beams is {self.num_beams}; a draft or a lookup guesses for one answer, not for beams"
            )
        if self.draft is not None and self.lookup:
            raise ValueError("both a draft and a lookup would guess; choose one")

    @property
    def guessing(self) -> bool:
        return self.draft is not None or self.lookup


class Prompt(Protocol):
    said: Tensor  # (B, T): what an answer goes on from
    real: Tensor  # (B, T) bool


@dataclass
class Text:
    said: Tensor
    real: Tensor


def ends_of(config: ModelConfig, options: Options) -> list[int]:
    eos = config.eos_id if options.eos_id is None else options.eos_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def pad_of(config: ModelConfig, options: Options) -> int:
    pad = config.pad_id if options.pad_id is None else options.pad_id
    ends = ends_of(config, options)
    return pad if pad is not None else ends[0] if ends else 0


def adjuster(model: Model, prompt: Prompt, options: Options) -> Callable[[Tensor, Tensor], Tensor]:
    """The function from logits (rows, V) and the new tokens so far (rows, n) to logits that heed the options."""
    said = model.generation
    first = _token(said, "forced_bos_token_id") if options.forced_first is None else options.forced_first
    last = _token(said, "forced_eos_token_id") if options.forced_last is None else options.forced_last
    size, ends = model.config.output_vocab_size, ends_of(model.config, options)
    words = [list(word) for word in (*options.bad_words, *_words(said.get("bad_words_ids")))]
    words = [word for word in words if word not in [[end] for end in ends]]
    banned = [*options.suppress, *(word[0] for word in words if len(word) == 1)]
    runs = [word for word in words if len(word) > 1]
    amounts = dict(options.logit_bias) | dict.fromkeys(banned, -float("inf"))
    outside = [token for token in (*amounts, *(token for run in runs for token in run)) if not 0 <= token < size]
    if outside:
        raise ValueError(f"token {outside[0]} is not among the {size} of the model")
    begins = first is not None and prompt.said.size(1) == 1
    allowed = None if options.constraint is None else options.constraint(ends, size)

    def adjust(scores: Tensor, new: Tensor) -> Tensor:
        times, plain = len(new) // len(prompt.said), scores
        if options.repetition_penalty != 1.0:
            seen = _counts(scores, prompt.said, prompt.real).repeat_interleave(times, 0) + _counts(scores, new)
            scores = sampling.repetition_penalty(scores, seen > 0, options.repetition_penalty)
        if options.no_repeat_ngrams or runs:
            prompts = [row[real].tolist() for row, real in zip(prompt.said, prompt.real, strict=True)]
            texts = [prompts[number // times] + row for number, row in enumerate(new.tolist())]
            scores = forbid_runs(scores, texts, runs)
            if options.no_repeat_ngrams:
                scores = sampling.no_repeat_ngrams(scores, texts, options.no_repeat_ngrams)
        if options.presence_penalty or options.frequency_penalty:
            counts = _counts(scores, new)
            scores = sampling.presence_and_frequency(
                scores, counts, options.presence_penalty, options.frequency_penalty
            )
        scores = sampling.bias(scores, amounts)
        if first is not None and begins and new.size(1) == 0:
            scores = sampling.force(scores, first)
        if last is not None and new.size(1) == options.max_new_tokens - 1:
            scores = sampling.force(scores, last)
        if allowed is not None and new.size(1) >= begins:  # a first token that is forced is no part of it
            scores = allow(scores, allowed(new[:, int(begins) :].tolist()).to(scores.device), plain)
        return scores

    return adjust


def _counts(scores: Tensor, tokens: Tensor, real: Tensor | None = None) -> Tensor:
    """(rows, V): how often each token occurs."""
    weight = torch.ones_like(tokens, dtype=scores.dtype) if real is None else real.to(scores.dtype)
    out = torch.zeros(len(tokens), scores.size(-1), dtype=scores.dtype, device=scores.device)
    return out.scatter_add_(-1, tokens, weight)


def _token(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def forbid_runs(scores: Tensor, texts: Sequence[Sequence[int]], runs: Sequence[Sequence[int]]) -> Tensor:
    """Forbid the last token of a run where a text ends with all before it."""
    scores = scores.clone()
    for row, text in enumerate(texts):
        scores[row, [run[-1] for run in runs if list(text[-len(run) + 1 :]) == list(run[:-1])]] = -torch.inf
    return scores


def allow(scores: Tensor, allowed: Tensor, plain: Tensor) -> Tensor:
    """Leave what is allowed; where nothing of it was left before, as it is in the plain scores."""
    left = scores.masked_fill(~allowed, -torch.inf)
    nothing = left.amax(-1, keepdim=True) == -torch.inf
    return torch.where(nothing, plain.masked_fill(~allowed, -torch.inf), left)


def _words(words: Any) -> list[list[int]]:
    """Forbidden words of generation settings, as Marian's checkpoints forbid padding."""
    lists = [word for word in words if isinstance(word, list) and word] if isinstance(words, list) else []
    return [word for word in lists if all(isinstance(token, int) for token in word)]
