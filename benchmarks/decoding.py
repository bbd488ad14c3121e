"""Generation against `transformers.generate`, the same weights and the same new tokens, in turn.

python -m benchmarks.decoding [CASE ...] [--rounds 7]

On a CPU: GPT-2 small, 32 tokens read and 64 made, in float32 and bfloat16, alone, in a batch of 16 and with 4 beams.
On a GPU: LLaMA-7B, 32 tokens read and 128 made, in bfloat16, alone and in a batch of 16, as both come and compiled;
`cold` is the time from the start of a program to its first token, and to the end of its first compiled answer.
Each contender is a process of its own; all load the checkpoint that this one writes, and in float32 their answers must
be the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lockstep import pace, race, typical
from benchmarks.timing import machine

READ = 32


class Case(NamedTuple):
    dtype: torch.dtype
    batch: int = 1
    beams: int = 1
    model: str = "gpt2"
    made: int = 64
    who: tuple[str, ...] = ("theirs", "ours")


GPU = Case(torch.bfloat16, model="llama-7b", made=128, who=("theirs", "theirs-compiled", "ours", "ours-compiled"))
CASES = {
    "float32": Case(torch.float32),
    "bfloat16": Case(torch.bfloat16),
    "float32-batch16": Case(torch.float32, batch=16),
    "bfloat16-batch16": Case(torch.bfloat16, batch=16),
    "float32-beams4": Case(torch.float32, beams=4),
    "bfloat16-beams4": Case(torch.bfloat16, beams=4),
}
GPU_CASES = {"llama": GPU, "llama-batch16": GPU._replace(batch=16, who=("theirs", "ours", "ours-compiled"))}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompt(case: Case) -> torch.Tensor:
    ids = torch.randint(1000, 30_000, (case.batch, READ), generator=torch.Generator().manual_seed(1))
    return ids.to(DEVICE)


def ours(folder: str, case: Case, compiled: bool) -> Callable[[], torch.Tensor]:
    import sublayer

    model = sublayer.load_model(folder, dtype=case.dtype, device=DEVICE)
    ids = prompt(case)
    return lambda: sublayer.generate(
        model, ids, max_new_tokens=case.made, num_beams=case.beams, eos_id=(), compile=compiled
    )


def theirs(folder: str, case: Case, compiled: bool) -> Callable[[], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype).to(DEVICE).eval()
    ids = prompt(case)
    options: dict[str, Any] = dict(
        max_new_tokens=case.made, min_new_tokens=case.made, do_sample=False, num_beams=case.beams, pad_token_id=0
    )
    if compiled:  # it compiles by itself where the cache is static
        options["cache_implementation"] = "static"
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, READ:]


def answerer(who: str, folder: str, case: Case) -> Callable[[], torch.Tensor]:
    return (ours if who.startswith("ours") else theirs)(folder, case, who.endswith("compiled"))


def work(who: str, folder: str, case: Case) -> None:
    answer = answerer(who, folder, case)
    turn = pace()
    turn(0)
    while True:
        tokens = answer().cpu()
        torch.save(tokens, Path(folder) / f"{who}.answer")
        turn(tokens.numel())


def make(folder: str, name: str) -> None:
    """Random weights, somewhat larger than usual, so that answers are not one token for ever."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "llama-7b":
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(DEVICE):
            model: Any = LlamaForCausalLM(LlamaConfig())
        torch.set_default_dtype(torch.float32)
    else:
        model = GPT2LMHeadModel(GPT2Config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)


def compare(name: str, case: Case, folder: str, rounds: int) -> None:
    commands = {
        who: [sys.executable, "-m", "benchmarks.decoding", name, "--worker", who, "--folder", folder]
        for who in case.who
    }
    done = {who: typical(times) for who, times in race(commands, rounds).items()}
    answers = {who: torch.load(Path(folder) / f"{who}.answer", weights_only=True) for who in case.who}
    for who, one in done.items():
        line = f"{name:<18} {who:<16} {1 / one.seconds:8.1f} tok/s"
        for peer in [peer for peer in case.who if peer.startswith("theirs") and who.startswith("ours")]:
            ratio, same = done[peer].seconds / one.seconds, float((answers[peer] == answers[who]).float().mean())
            processor = done[peer].processor_seconds / one.processor_seconds
            line += f"  {ratio:5.2f}× {peer} ({processor:.2f}× by processor time, {same:.0%} the same tokens)"
        print(line, flush=True)


def cold(folder: str) -> None:
    """From the start of a program: as it comes, then compiled, and once more with what the compiler left on disk."""
    with tempfile.TemporaryDirectory() as cache:
        for who in ("ours", "ours-compiled", "ours-compiled"):
            command = [sys.executable, "-m", "benchmarks.decoding", "llama", "--once", who, "--folder", folder]
            begun = time.time()
            done = subprocess.run(
                command, env={**os.environ, "SUBLAYER_CACHE": cache}, capture_output=True, text=True, check=True
            )
            first, last = (float(moment) - begun for moment in done.stdout.split()[-2:])
            print(f"cold start         {who:<16} first token after {first:.1f} s, 128 after {last:.1f} s", flush=True)


def once(who: str, folder: str, case: Case) -> None:
    import sublayer

    model, ids = sublayer.load_model(folder, dtype=case.dtype, device=DEVICE), prompt(case)
    sublayer.generate(model, ids, max_new_tokens=1, eos_id=()).cpu()
    first = time.time()
    sublayer.generate(model, ids, max_new_tokens=case.made, eos_id=(), compile=who.endswith("compiled")).cpu()
    print(first, time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join([*CASES, *GPU_CASES, "cold"]))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = CASES | GPU_CASES
    if given.worker:
        work(given.worker, given.folder, known[given.cases[0]])
        return
    if given.once:
        once(given.once, given.folder, known[given.cases[0]])
        return
    print(machine())
    names = given.cases or ([*GPU_CASES, "cold"] if DEVICE == "cuda" else [*CASES])
    with tempfile.TemporaryDirectory() as folder:
        make(folder, "llama-7b" if {*names} & {*GPU_CASES, "cold"} else "gpt2")
        for name in names:
            cold(folder) if name == "cold" else compare(name, known[name], folder, given.rounds)


if __name__ == "__main__":
    main()
