"""The original base model on real pairs: ours, and the same architecture in transformers' Trainer, on the same tokens.

    python -m benchmarks.translate ours   --data FOLDER --out runs/ours
    python -m benchmarks.translate theirs --data FOLDER --out runs/theirs
    python -m benchmarks.translate score  --data FOLDER --out runs/ours

FOLDER holds en-de.train.tsv.gz, en-de.valid.tsv.gz and en-de.test.tsv.gz: domain, English, German. Both read the same
ids from the same store, see as many tokens a step, and follow the same schedule; both are scored by the same greedy
search, with sacrebleu.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

import sublayer
from benchmarks.timing import machine
from sublayer.evaluate import compare, write
from sublayer.train import prepare, train
from sublayer.training.distributed import join
from sublayer.training.recipe import Recipe, find_recipe, load_recipe


def recipe_of(options: argparse.Namespace) -> Recipe:
    data = Path(options.data)
    changes = [
        f"data.train={data / 'en-de.train.tsv.gz'}", f"data.valid={data / 'en-de.valid.tsv.gz'}",
        "data.max_length=128", "data.group_by_length=false",
        "model.d_model=512", "model.d_ff=2048", "model.num_heads=8", "model.num_encoder_layers=6",
        "model.num_decoder_layers=6", "model.dropout=0.2",
        "tokenizer.vocab_size=16000", "tokenizer.extra=[]",
        f"train.steps={options.steps}", f"train.batch_tokens={options.batch_tokens}", "train.lr=7e-4",
        "train.warmup=1000", "train.schedule=inverse-sqrt", "train.betas=[0.9, 0.98]", "train.label_smoothing=0.1",
        "train.dtype=bfloat16", "train.log_every=100", "train.save_every=none", "train.eval_every=2000",
        "train.eval_samples=0", "train.clip=1.0",
    ]  # fmt: skip
    return load_recipe(find_recipe("translate"), [*changes, *options.settings])


def ours(options: argparse.Namespace) -> None:
    recipe = recipe_of(options)
    begun = time.perf_counter()
    trainer = train(recipe, Path(options.out))
    lines = [json.loads(line) for line in (Path(options.out) / "metrics.jsonl").open()]
    rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    print(f"ours: {rates[len(rates) // 2]:,.0f} target tokens/s, {trainer.state.seconds:.1f} s of training, "
          f"{time.perf_counter() - begun:.1f} s in all, {trainer.state.tokens:,} target tokens")  # fmt: skip


def theirs(options: argparse.Namespace) -> None:
    from transformers import (
        DataCollatorForSeq2Seq,
        MarianConfig,
        MarianMTModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    recipe = recipe_of(options)
    run = prepare(recipe, Path(options.out), join(None, "auto"))
    config = run.model.config
    model = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers, encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads, encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff,
            dropout=config.dropout, attention_dropout=0.0, activation_dropout=0.0, activation_function="relu",
            max_position_embeddings=config.max_positions, scale_embedding=True, pad_token_id=config.pad_id,
            eos_token_id=config.eos_id, bos_token_id=None, decoder_start_token_id=config.start_id,
            forced_eos_token_id=None, init_std=config.d_model**-0.5,
        )
    )  # fmt: skip
    with torch.no_grad():  # the paper's initialisation, as ours has it
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "shared" not in name and "embed" not in name:
                torch.nn.init.xavier_uniform_(parameter)
    store, limit = run.store, recipe.data.max_length

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(store)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = store.row(index)
            target = [*row["target"].tolist(), config.eos_id][:limit]
            return {"input_ids": row["source"].tolist()[:limit], "labels": target}

    lengths = run.loader.items.lengths
    batch = max(1, round(options.batch_tokens / float(lengths.mean())))
    print(f"theirs: {batch} pairs a step, {float(lengths.mean()):.1f} tokens each", flush=True)

    class Pad(DataCollatorForSeq2Seq):
        """Pads with torch alone: the same as the collator of transformers, without a tokenizer of theirs."""

        def __call__(self, features: list[dict[str, Any]], return_tensors: Any = None) -> dict[str, Any]:
            ids = [torch.tensor(f["input_ids"]) for f in features]
            labels = [torch.tensor(f["labels"]) for f in features]
            source = torch.nn.utils.rnn.pad_sequence(ids, True, config.pad_id or 0)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], True, 0)
            target = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
            start = torch.full((len(ids), 1), config.start_id or 0)
            inputs = torch.cat([start, target[:, :-1].clamp(min=0)], 1)
            return {"input_ids": source, "attention_mask": mask, "labels": target, "decoder_input_ids": inputs}

    marks: list[tuple[int, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % 20 == 0:
                torch.cuda.synchronize()
                marks.append((state.global_step, time.perf_counter()))
                if options.minutes and marks[-1][1] - begun > options.minutes * 60:
                    control.should_training_stop = True

    arguments = Seq2SeqTrainingArguments(
        options.out, per_device_train_batch_size=batch, max_steps=options.steps, learning_rate=7e-4,
        lr_scheduler_type="inverse_sqrt", warmup_steps=1000, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-9,
        max_grad_norm=1.0, label_smoothing_factor=0.1, bf16=True, optim="adamw_torch_fused", report_to=[],
        save_strategy="no", logging_steps=100, disable_tqdm=True, dataloader_num_workers=options.workers,
        seed=recipe.train.seed, weight_decay=0.0,
        **({"train_sampling_strategy": "group_by_length"} if options.grouped else {}),
    )  # fmt: skip
    begun = time.perf_counter()
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=Rows(), data_collator=Pad(None, model=model), callbacks=[Clock()]
    )
    trainer.train()
    per_step = float(store.lengths("target").mean() + 1) * batch
    steps = [20 / (b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    rate = sorted(steps)[len(steps) // 2] * per_step
    print(f"theirs: {rate:,.0f} target tokens/s, {time.perf_counter() - begun:.1f} s of training, "
          f"{trainer.state.global_step} steps")  # fmt: skip
    model.save_pretrained(Path(options.out) / "model")
    assert run.tokenizer is not None
    run.tokenizer.save(Path(options.out) / "model")


def score(options: argparse.Namespace) -> None:
    lm = sublayer.load(Path(options.out) / "model", device="cuda" if torch.cuda.is_available() else "cpu")
    with gzip.open(Path(options.data) / "en-de.test.tsv.gz", "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][: options.limit]
    ids = [one[:128] for one in lm.tokenizer.encode_batch([row[1] for row in rows])]
    produced = [lm.tokenizer.decode(one).strip() for one in write(lm.model.eval(), ids, 128, batch=256)]
    parts: dict[str, list[int]] = collections.defaultdict(list)
    for number, row in enumerate(rows):
        parts[row[0]].append(number)
    parts["all"] = list(range(len(rows)))
    for domain, numbers in parts.items():
        scores = compare([produced[n] for n in numbers], [rows[n][2] for n in numbers])
        print(
            f"{options.out} {domain:<10} {len(numbers):5} texts  BLEU {scores['bleu']:5.2f}  chrF {scores['chrf']:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ours", "theirs", "score"))
    parser.add_argument("settings", nargs="*", help="changes to our recipe, key=value")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=25_000)
    parser.add_argument("--minutes", type=float, help="an end for theirs, whatever the steps")
    parser.add_argument("--grouped", action="store_true", help="theirs: batches grouped by length")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit", type=int, default=None)
    options = parser.parse_intermixed_args()
    print(machine(), flush=True)
    {"ours": ours, "theirs": theirs, "score": score}[options.what](options)


if __name__ == "__main__":
    main()
