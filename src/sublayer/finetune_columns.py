"""Which objective a model and the columns of its data ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import ModelConfig
from .data import Tokenizer
from .data.chat import find_template


@dataclass(frozen=True)
class Fit:
    columns: tuple[str, ...]
    objective: str
    settings: dict[str, str] = field(default_factory=dict)  # keys of [data], where the columns have other names there


LABELLED, PAIRS, PROMPTS = ("text", "label"), ("source", "target"), ("prompt", "completion")
INSTRUCTIONS = (("instruction", "input", "output"), ("instruction", "output"))  # as Alpaca calls them


def _instructions(columns: tuple[str, ...], objective: str, asked: str, answer: str) -> Fit:
    names = {asked: "instruction", answer: "output"} | ({"input": "input"} if "input" in columns else {})
    return Fit(columns, objective, names)


# By the kind of model, the first that the columns allow is taken.
FITS: dict[str, list[Fit]] = {
    "decoder": [
        Fit(("messages",), "chat"),
        Fit(("conversations",), "chat", {"messages": "conversations"}),
        Fit(PROMPTS, "prompt-completion"),
        Fit(PAIRS, "prompt-completion", {"prompt": "source", "completion": "target"}),
        *(_instructions(columns, "prompt-completion", "prompt", "completion") for columns in INSTRUCTIONS),
        Fit(LABELLED, "prompt-completion", {"prompt": "text", "completion": "label"}),
        Fit(("text",), "causal"),
    ],
    "encoder": [
        Fit((*LABELLED, "pair"), "classify-sequence", {"pair": "pair"}),
        Fit(LABELLED, "classify-sequence"),
        Fit(("words", "tags"), "classify-tokens"),
        Fit(("question", "context", "answer"), "find-span"),
        Fit(("text",), "masked"),
    ],
    "encoder of images": [Fit(("image", "label"), "classify-image")],
    "encoder-decoder": [
        Fit(PAIRS, "sequence-to-sequence"),
        Fit(PROMPTS, "sequence-to-sequence", {"source": "prompt", "target": "completion"}),
        *(_instructions(columns, "sequence-to-sequence", "source", "target") for columns in INSTRUCTIONS),
        Fit(LABELLED, "sequence-to-sequence", {"source": "text", "target": "label"}),
        Fit(("text",), "span-corruption"),
    ],
}


def kind_of_model(config: ModelConfig) -> str:
    return "encoder of images" if config.image_input else config.shape


def choose(
    config: ModelConfig, columns: Sequence[str], given: Mapping[str, Any], tokenizer: Tokenizer | None, where: str
) -> tuple[dict[str, Any], str]:
    """The keys of [data] that the columns ask for, and a line that says what was chosen and why.

    `given` has the keys that the user set: data.text=body says which column holds the text.
    """
    kind = kind_of_model(config)
    for fit in FITS[kind]:
        found = [given.get(name) or name for name in fit.columns]
        if not set(found) <= set(columns):
            continue
        named = {key: str(given.get(name) or name) for key, name in fit.settings.items() if key not in given}
        settings: dict[str, Any] = {"objective": fit.objective} | named
        if fit.objective == "span-corruption":
            settings["objective"] = _of_plain_text(tokenizer, where)
        many = "columns" if len(found) > 1 else "column"
        why = f"the model is {_a(kind)}, and {where} has the {many} {_and(found)}"
        if fit.columns in INSTRUCTIONS and kind == "decoder":
            chat = given.get("as_chat", _has_template(tokenizer))
            usual = {"as_chat": True} if chat else {"between": "\n\n"}
            settings |= {key: value for key, value in usual.items() if key not in given}
            why += "; by the model's chat template" if chat else "; without a chat template"
        return settings, f"objective: {settings['objective']}, because {why}"
    fits = "; ".join(_and(fit.columns) for fit in FITS[kind])
    seen = ", ".join(" ".join(column.split())[:40] for column in columns[:12])
    raise ValueError(
        f"{where}: the columns {seen} fit no objective for {_a(kind)}; it learns from {fits}. "
        "Rename them, or say which is which, as in data.text=COLUMN"
    )


def _has_template(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and find_template(tokenizer.settings, tokenizer.folder) is not None


def _of_plain_text(tokenizer: Tokenizer | None, where: str) -> str:
    """What an encoder-decoder was trained with: T5 has sentinels in its vocabulary, BART a mask."""
    if tokenizer is not None and tokenizer.sentinels():
        return "span-corruption"
    if tokenizer is not None and tokenizer.special("mask") is not None:
        return "denoising"
    raise ValueError(f"{where} is plain text, from which this encoder-decoder cannot learn; give source and target")


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * bool(names[:-1]) + [names[-1]])


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
