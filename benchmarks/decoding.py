"""Generation against `transformers.generate`, the same weights and the same new tokens, in turn.

python -m benchmarks.decoding [CASE ...] [--rounds 7]

On a CPU: GPT-2 small, 32 tokens read and 64 made, in float32 and bfloat16, alone, in a batch of 16 and with 4 beams.
Each contender is a process of its own; both load the checkpoint that this one writes, and in float32 their answers must
be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.lockstep import pace, race, typical
from benchmarks.timing import machine

READ, MADE = 32, 64


class Case(NamedTuple):
    dtype: torch.dtype
    batch: int = 1
    beams: int = 1


CASES = {
    "float32": Case(torch.float32),
    "bfloat16": Case(torch.bfloat16),
    "float32-batch16": Case(torch.float32, batch=16),
    "bfloat16-batch16": Case(torch.bfloat16, batch=16),
    "float32-beams4": Case(torch.float32, beams=4),
    "bfloat16-beams4": Case(torch.bfloat16, beams=4),
}


def prompt(case: Case) -> torch.Tensor:
    return torch.randint(1000, 40_000, (case.batch, READ), generator=torch.Generator().manual_seed(1))


def ours(folder: str, case: Case) -> Callable[[], torch.Tensor]:
    import sublayer

    model = sublayer.load_model(folder, dtype=case.dtype)
    ids = prompt(case)
    return lambda: sublayer.generate(model, ids, max_new_tokens=MADE, num_beams=case.beams, eos_id=())


def theirs(folder: str, case: Case) -> Callable[[], torch.Tensor]:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=case.dtype).eval()
    ids = prompt(case)
    options = dict(max_new_tokens=MADE, min_new_tokens=MADE, do_sample=False, num_beams=case.beams, pad_token_id=0)
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, READ:]


def work(name: str, folder: str, case: Case) -> None:
    answer = {"ours": ours, "theirs": theirs}[name](folder, case)
    turn = pace()
    turn(0)
    while True:
        tokens = answer()
        torch.save(tokens, Path(folder) / f"{name}.answer")
        turn(tokens.numel())


def make(folder: str) -> None:
    """GPT-2 small with random weights, somewhat larger than usual, so that its answers are not one token for ever."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)


def compare(name: str, folder: str, rounds: int) -> None:
    commands = {
        who: [sys.executable, "-m", "benchmarks.decoding", name, "--worker", who, "--folder", folder]
        for who in ("ours", "theirs")
    }
    done = {who: typical(times) for who, times in race(commands, rounds).items()}
    answers = [torch.load(Path(folder) / f"{who}.answer", weights_only=True) for who in commands]
    ratio = done["theirs"].seconds / done["ours"].seconds
    processor = done["theirs"].processor_seconds / done["ours"].processor_seconds
    rates = "  ".join(f"{who} {1 / one.seconds:7.1f} tok/s" for who, one in done.items())
    same = float((answers[0] == answers[1]).float().mean())
    print(
        f"{name:<18} {rates}  {ratio:5.2f}×  ({processor:.2f}× by processor time)  {same:.0%} the same tokens",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.folder, CASES[given.cases[0]])
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        for name in given.cases or CASES:
            compare(name, folder, given.rounds)


if __name__ == "__main__":
    main()
