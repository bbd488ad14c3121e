"""Programs timed in turn, each in a process of its own, so that neither's settings touch the other.

A worker calls `pace()` once; what it gives back is called before each round of work and returns when it is its turn.
Whoever waits is halted whole: none of its threads spins, or fetches data beforehand, in the time of another.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Round(NamedTuple):
    work: float
    seconds: float
    processor_seconds: float  # of all threads: what a machine that others use too changes least


def pace() -> Callable[[float], None]:
    """In a worker: call the result with the work done (tokens, say) in the round that ended; it waits for the next."""
    begun: list[float] = []

    def turn(work: float) -> None:
        if begun:
            seconds, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
            print(json.dumps({"work": work, "seconds": seconds, "processor_seconds": processor}), flush=True)
        line = sys.stdin.readline()
        if line.strip() != "go":
            raise SystemExit(0)
        begun[:] = [time.perf_counter(), time.process_time()]

    return turn


def race(commands: Mapping[str, Sequence[str]], rounds: int, warmup: int = 2) -> dict[str, list[Round]]:
    """The rounds of each command, taken in turn."""
    workers = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    done: dict[str, list[Round]] = {name: [] for name in commands}
    try:
        for number in range(warmup + rounds):
            for name, worker in workers.items():
                result = _round(name, worker)
                if number >= warmup:
                    done[name].append(result)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
    return done


def typical(rounds: Sequence[Round]) -> Round:
    """One unit of work, each time the median over rounds: for rounds of the same work."""
    return Round(
        1.0,
        statistics.median(one.seconds / one.work for one in rounds),
        statistics.median(one.processor_seconds / one.work for one in rounds),
    )


def overall(rounds: Sequence[Round]) -> Round:
    """All rounds as one: for rounds whose work differs, and a rate that depends on it."""
    return Round(*(sum(values) for values in zip(*rounds, strict=True)))


def _round(name: str, worker: subprocess.Popen[str]) -> Round:
    """One round of a worker: the work it did, and the seconds it took by its own clock."""
    assert worker.stdin is not None and worker.stdout is not None
    os.kill(worker.pid, signal.SIGCONT)
    worker.stdin.write("go\n")
    worker.stdin.flush()
    for line in worker.stdout:  # what libraries print is not for us
        if line.startswith('{"work"'):
            os.kill(worker.pid, signal.SIGSTOP)
            return Round(**json.loads(line))
    raise RuntimeError(f"{name} ended early with code {worker.wait()}")
