"""Memory of training LLaMA-7B's shape on one GPU, beside what `sublayer.plan` says of it before.

python -m benchmarks.memory [--methods full lora qlora] [--preset llama-7b] [--tokens 2048]
python -m benchmarks.memory --peer          # transformers and peft with LLaMA-7B's shape: full and lora

One sequence of 2,048 tokens a step, activations recomputed, AdamW; all weights, LoRA of rank 8 beside weights in
bfloat16, and beside weights in 4 bits. The trainer is the one that `sublayer train` and `sublayer finetune` run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
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


def run(method: str, name: str, tokens: int, more: list[str]) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak."""
    changes = [
        "tokenizer.vocab_size=1000", f"data.max_length={tokens}", f"train.batch_tokens={tokens}", "train.steps=4",
        "train.dtype=bfloat16", "train.recompute=true", "train.optimizer=adamw", *more,
    ]  # fmt: skip
    recipe = load_recipe(find_recipe("llama"), changes)
    start = Built(recipe)
    start.method, start.name = method, name
    with tempfile.TemporaryDirectory() as folder:
        return measure(prepare(recipe, Path(folder), join(None, "auto"), quiet=True, start=start))


def peer(method: str, tokens: int) -> tuple[float, float]:
    """The same of transformers' model, with peft's adapter: as `Trainer` runs it, without what it does beside."""
    import transformers

    dtype = torch.bfloat16 if METHODS[method] else torch.float32
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(), dtype=dtype)
    if METHODS[method]:
        import peft

        config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)
    ids = torch.randint(1000, (1, tokens), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), float(torch.cuda.max_memory_allocated())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--preset", default="llama-7b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--peer", action="store_true")
    given, more = parser.parse_known_args()
    print(machine())
    if given.peer:
        for method in given.methods or ("full", "lora"):
            seconds, memory = peer(method, given.tokens)
            print(f"{method:<6} peer: measured {memory / 2**30:7.2f} GiB; {seconds:.2f} s a step", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        return
    for method in given.methods or METHODS:
        seconds, memory = run(method, given.preset, given.tokens, more)
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
