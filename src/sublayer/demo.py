"""`sublayer demo`: the original Transformer, trained from scratch in a few minutes to translate what CLDR can write.

English dates, times, numbers, prices, units and durations become German and Chinese. The pairs are made on the spot,
endless and exact; the values it is tested on (each date, each number) were never seen in training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .data.corpora import KINDS, Pair, cldr_pairs
from .evaluate import write
from .lm import LM, load
from .presets_table import wide_console
from .train import train
from .training.progress import duration
from .training.recipe import find_recipe, load_recipe

CHANGES = (
    "model.d_model=128", "model.d_ff=512", "model.num_encoder_layers=2", "model.num_decoder_layers=2",
    "model.dropout=0.0", "data.corpus_size=100000", "data.max_length=64", "tokenizer.vocab_size=1200",
    "train.steps=1000", "train.batch_tokens=3072", "train.lr=3e-3", "train.warmup=200", "train.schedule=linear",
    "train.betas=[0.9, 0.98]", "train.label_smoothing=0.0", "train.eval_every=500", "train.save_every=250",
    "train.log_every=50",
)  # fmt: skip
TESTED = 1000


def run(out: str | None = None, changes: Sequence[str] = (), tested: int = TESTED) -> int:
    console, begun = wide_console(), time.perf_counter()
    folder = Path(out or "runs/demo")
    recipe = load_recipe(find_recipe("translate"), [*CHANGES, *changes])
    model = folder / "model"
    if (model / "config.json").exists():
        console.print(f"{model} is already trained; remove {folder} to train it again.\n")
    else:
        console.print("Training an encoder-decoder Transformer from scratch: English to German and Chinese.\n")
        trainer = train(recipe, folder, resume=True)
        if trainer.stopped_by:
            console.print(f"stopped at step {trainer.state.step}; the same command goes on from there")
            return 130
    lm = load(model)
    pairs = list(cldr_pairs(tested, split="test"))
    produced = translate(lm, [pair.source for pair in pairs])
    _show_examples(console, pairs, produced)
    right = _show_score(console, pairs, produced)
    console.print(f"\n{right:.1%} of {tested:,} texts with values never seen in training are exactly right.")
    console.print(
        f"{duration(time.perf_counter() - begun)} in all. Curves, samples and attention: {folder / 'report.html'}"
    )
    console.print(f"Next: sublayer translate {model} --to zh 'Friday, March 14, 2031'")
    return 0


def translate(lm: LM, texts: Sequence[str], limit: int = 64) -> list[str]:
    return [lm.tokenizer.decode(ids) for ids in write(lm.model, lm.tokenizer.encode_batch(texts), limit)]


def _show_examples(console: Console, pairs: Sequence[Pair], produced: Sequence[str]) -> None:
    """Two of each kind, one in each language where there is one."""
    table = Table("", "source", "translation", "", box=None)
    for kind in KINDS:
        for language in ("<de>", "<zh>"):
            found = [n for n, pair in enumerate(pairs) if pair.kind == kind and pair.source.startswith(language)]
            for n in found[:1]:
                mark = "" if produced[n] == pairs[n].target else f"[red]expected {pairs[n].target}[/]"
                table.add_row(kind, pairs[n].source, produced[n], mark)
    console.print()
    console.print(table)


def _show_score(console: Console, pairs: Sequence[Pair], produced: Sequence[str]) -> float:
    table = Table("", "right", "of", box=None)
    hits = [pair.target == text for pair, text in zip(pairs, produced, strict=True)]
    for kind in KINDS:
        of_kind = [hit for pair, hit in zip(pairs, hits, strict=True) if pair.kind == kind]
        table.add_row(kind, str(sum(of_kind)), str(len(of_kind)))
    console.print()
    console.print(table)
    return sum(hits) / len(hits)
