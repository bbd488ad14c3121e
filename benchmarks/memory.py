"""Memory of training LLaMA-7B's shape on one GPU, beside what `sublayer.plan` says of it before.

python -m benchmarks.memory [full lora qlora] [--preset llama-7b] [--tokens 2048]

One sequence of 2,048 tokens a step, activations recomputed, AdamW; all weights, LoRA of rank 8 beside weights in
bfloat16, and beside weights in 4 bits. The trainer is the one that `sublayer train` and `sublayer finetune` run.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

import sublayer
from benchmarks.timing import machine
from sublayer.dry_run import measure
from sublayer.start import Fresh
from sublayer.train import prepare
from sublayer.training.distributed import join
from sublayer.training.recipe import find_recipe, load_recipe

RANK = 8
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora_rank": RANK}, "qlora": {"lora_rank": RANK, "bits": 4}}


class Built(Fresh):
    """The preset with random weights, as a checkpoint of it would be loaded for the method."""

    method, name = "full", "llama-7b"

    def model(self, context: Any, device: torch.device) -> Any:
        how = METHODS[self.method]
        dtype = torch.bfloat16 if how else torch.float32
        model = sublayer.build(sublayer.preset(self.name), device=device, dtype=dtype)
        if "bits" in how:
            sublayer.lora.quantize(model, how["bits"], device=device)
        if how:
            sublayer.lora.add(model, how["lora_rank"])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return model


def run(method: str, name: str, tokens: int) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak."""
    changes = [
        "tokenizer.vocab_size=1000", f"data.max_length={tokens}", f"train.batch_tokens={tokens}", "train.steps=4",
        "train.dtype=bfloat16", "train.recompute=true", "train.optimizer=adamw",
    ]  # fmt: skip
    recipe = load_recipe(find_recipe("llama"), changes)
    start = Built(recipe)
    start.method, start.name = method, name
    with tempfile.TemporaryDirectory() as folder:
        return measure(prepare(recipe, Path(folder), join(None, "auto"), quiet=True, start=start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--preset", default="llama-7b")
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    print(machine())
    for method in given.methods or METHODS:
        seconds, memory = run(method, given.preset, given.tokens)
        plan = sublayer.plan(
            sublayer.preset(given.preset), batch=1, seq=given.tokens, recompute=True, **METHODS[method]
        )
        print(
            f"{method:<6} measured {memory / 2**30:7.2f} GiB, planned {plan.total_bytes / 2**30:7.2f} GiB, "
            f"{plan.total_bytes / memory - 1:+.1%}; {seconds:.2f} s a step",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
