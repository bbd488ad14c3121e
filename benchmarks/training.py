"""Training on the CPU against transformers' Trainer: the same model, data, optimiser and arithmetic, two threads each.

python -m benchmarks.training [gpt] [llama] [pairs --pairs FILE]

Both sides run their own loop over their own loader, and what is compared is real tokens per second: padding counts for
nothing. FILE has three columns, tab-separated and without a header: domain, source and target; it may be compressed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sublayer
from benchmarks.lockstep import Round, overall, pace, race, typical
from benchmarks.timing import machine
from sublayer.data.batches import Loader, Step
from sublayer.data.items import CausalRows
from sublayer.data.settings import DataSettings
from sublayer.data.store import Store, Writer
from sublayer.data.tasks import Context, Labels
from sublayer.hub import load_model, save_model
from sublayer.train import prepare
from sublayer.training.distributed import World
from sublayer.training.memory import keep_memory
from sublayer.training.recipe import Recipe, TrainSettings, find_recipe, load_recipe
from sublayer.training.trainer import Trainer

THREADS = 2
ENDLESS = 1_000_000  # steps; the race ends a run, not its length
ROUNDS = 7
ROWS, LENGTH = 8, 256  # of a step of the language models
PAIRS = 64  # of a step of the peer
SMOOTHING = 0.1
SMALL = {"d_model": 384, "num_heads": 6, "num_decoder_layers": 6, "max_positions": LENGTH}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
DECODERS = {
    "gpt": dataclasses.replace(sublayer.preset("gpt2"), d_ff=1536, **SMALL, **NO_DROPOUT),
    "llama": dataclasses.replace(sublayer.preset("llama-2-7b"), d_ff=1024, num_kv_heads=2, vocab_size=8000, **SMALL),
}


class Rounds:
    """Counts the tokens of each step, and waits for its turn after every `steps` of them."""

    def __init__(self, steps: int) -> None:
        self.steps, self.turn = steps, pace()
        self.done, self.tokens = 0, 0

    def before_step(self, tokens: int) -> None:
        if self.done % self.steps == 0:
            self.turn(self.tokens)
            self.tokens = 0
        self.done += 1
        self.tokens += tokens


# Ours


def train_ours(model: sublayer.Model, loader: Loader, settings: TrainSettings, folder: Path, rounds: Rounds) -> None:
    class Paced(Trainer):
        def learn(self, step: Step) -> None:
            rounds.before_step(sum(batch.targets for batch in step.batches))
            super().learn(step)

    keep_memory()  # as `sublayer train` does
    Paced(
        model, loader, settings, folder, save_model=save_model, load_model=lambda path: load_model(path), quiet=True
    ).run()


def settings(dtype: str, smoothing: float = 0.0, batch_tokens: int = ROWS * LENGTH) -> TrainSettings:
    return TrainSettings(
        steps=ENDLESS, dtype=dtype, label_smoothing=smoothing, batch_tokens=batch_tokens, save_every=None
    )


# Theirs


def train_theirs(
    model: Any, rows: Sequence[Any], dtype: str, rounds: Rounds, *, batch: int, smoothing: float = 0.0,
    grouped: bool = False, collator: Any = None,
) -> None:  # fmt: skip
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    class Paced(Seq2SeqTrainer):
        def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
            rounds.before_step(int(inputs["labels"].ne(-100).sum()))
            return super().training_step(model, inputs, *others, **more)

    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder, per_device_train_batch_size=batch, max_steps=ENDLESS, optim="adamw_torch_fused",
            bf16=dtype == "bfloat16", use_cpu=True, label_smoothing_factor=smoothing, save_strategy="no", report_to=[],
            disable_tqdm=True, train_sampling_strategy="group_by_length" if grouped else "random",
        )  # fmt: skip
        Paced(model, arguments, train_dataset=rows, data_collator=collator).train()


# The language models: rows of one length, random ids


def write_rows(folder: Path, vocab_size: int) -> None:
    folder.mkdir()
    writer = Writer(folder, {"text": "int64"})
    random = np.random.default_rng(0)
    for _ in range(512 * ROWS):
        writer.add({"text": random.integers(vocab_size, size=LENGTH + 1)})
    writer.finish({})


def work_decoder(who: str, dtype: str, folder: Path, rounds: Rounds) -> None:
    store = Store(folder / "rows")
    if who == "theirs":
        from transformers import AutoModelForCausalLM

        rows = [torch.from_numpy(store.row(number)["text"][:LENGTH].copy()) for number in range(len(store))]
        data = [{"input_ids": row, "labels": row} for row in rows]
        train_theirs(AutoModelForCausalLM.from_pretrained(folder / "model"), data, dtype, rounds, batch=ROWS)
        return
    context = Context(None, DataSettings(objective="causal", max_length=LENGTH), Labels())
    loader = Loader(items=CausalRows(store, context), batch_tokens=ROWS * LENGTH)
    train_ours(load_model(folder / "model"), loader, settings(dtype), folder / "run", rounds)


def race_decoder(name: str, dtype: str, rounds: int) -> None:
    config = DECODERS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_rows(folder / "rows", config.vocab_size)
        save_model(sublayer.build(config, seed=0), folder / "model")
        commands = {who: _command(name, who, dtype, folder, steps=1) for who in ("theirs", "ours")}
        rates = {who: typical(done) for who, done in race(commands, rounds, warmup=1).items()}
    title = f"{name}, 6 layers, d 384, vocabulary {config.vocab_size}, {ROWS} × {LENGTH}, {dtype}"
    show(title, {"transformers": rates["theirs"], "sublayer": rates["ours"]})


# Pairs of texts


def pairs_recipe(file: str) -> Recipe:
    return load_recipe(find_recipe("translate"), [f"data.train={file}", "data.names=['domain', 'source', 'target']"])


def work_pairs(who: str, dtype: str, folder: Path, rounds: Rounds, file: str) -> None:
    run = prepare(pairs_recipe(file), folder / "run", World(), quiet=True)
    if who == "ours":
        # As many tokens a step as the peer has in the mean, by the measure that the loader cuts batches by.
        tokens = round(PAIRS * float(run.loader.items.lengths.mean()))
        loader = dataclasses.replace(run.loader, batch_tokens=tokens)
        train_ours(run.model, loader, settings(dtype, SMOOTHING, tokens), folder / "run", rounds)
        return
    from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
    chosen = np.random.default_rng(0).permutation(len(run.loader.items))[: 512 * PAIRS]
    examples = [run.loader.items.examples(int(number), None, 0)[0] for number in chosen]
    rows = [{"input_ids": one["source"].tolist(), "labels": one["labels"].tolist()} for one in examples]
    train_theirs(
        model, rows, dtype, rounds, batch=PAIRS, smoothing=SMOOTHING, grouped=who == "grouped",
        collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )  # fmt: skip


def race_pairs(file: str, dtype: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = prepare(pairs_recipe(file), folder / "run", World())
        run.save(run.model, folder / "model")
        items = run.loader.items
        names = ("theirs", "grouped", "ours")
        commands = {who: [*_command("pairs", who, dtype, folder, steps=5), "--pairs", file] for who in names}
        # The peer sorts stretches of 50 batches by length, and only a whole stretch is like every other.
        rates = {who: overall(done) for who, done in race(commands, 10 * rounds, warmup=1).items()}
    title = f"pairs, 3 + 3 layers, d 256, vocabulary {run.model.config.vocab_size}, {PAIRS} pairs, {dtype}"
    named = {"theirs": "transformers", "grouped": "transformers, grouped by length", "ours": "sublayer"}
    show(f"{title}; {len(items)} pairs of {items.lengths.mean():.1f} tokens", {named[who]: rates[who] for who in names})


# The command


def _command(name: str, who: str, dtype: str, folder: Path, steps: int) -> list[str]:
    worker = [sys.executable, "-m", "benchmarks.training", name, "--worker", who, "--dtype", dtype]
    return [*worker, "--folder", str(folder), "--steps", str(steps)]


def show(title: str, rounds: dict[str, Round]) -> None:
    """A row a contender: real tokens per second, and how many times that is the last one's; by two clocks."""
    ours = list(rounds.values())[-1]
    print(f"\n{title}")
    for name, one in rounds.items():
        clocks = ((one.seconds, ours.seconds, "s"), (one.processor_seconds, ours.processor_seconds, "processor second"))
        cells = [f"{one.work / t:8.0f} tokens/{unit} {t / one.work * ours.work / o:5.2f}×" for t, o, unit in clocks]
        print(f"  {name:<34} {'   '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training against transformers' Trainer, on the CPU.")
    parser.add_argument("names", nargs="*", choices=["gpt", "llama", "pairs"], default=[])
    parser.add_argument("--pairs", help="a tab-separated file: domain, source, target")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: both, and float32 for pairs")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; for pairs 1, a stretch of 50 steps")
    for hidden in ("--worker", "--folder", "--steps"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.worker:
        warnings.filterwarnings("ignore")
        work(options)
        return
    print(machine())
    for name in options.names or ["gpt", "llama", *(["pairs"] if options.pairs else [])]:
        if name == "pairs" and not options.pairs:
            parser.error("pairs needs --pairs FILE, a tab-separated file of domain, source and target")
        usual = ["float32"] if name == "pairs" else ["float32", "bfloat16"]
        for dtype in [options.dtype] if options.dtype else usual:
            if name == "pairs":
                race_pairs(options.pairs, dtype, options.rounds or 1)
            else:
                race_decoder(name, dtype, options.rounds or ROUNDS)


def work(options: argparse.Namespace) -> None:
    rounds, folder = Rounds(int(options.steps)), Path(options.folder)
    if options.names == ["pairs"]:
        work_pairs(options.worker, options.dtype, folder, rounds, options.pairs)
    else:
        work_decoder(options.worker, options.dtype, folder, rounds)


if __name__ == "__main__":
    main()
