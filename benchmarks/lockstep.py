"""Two programs timed in turn, each in a process of its own, so that neither's settings touch the other.

A worker calls `pace()` once; what it gives back is called before each round of work and returns when it is its turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence


def pace() -> Callable[[float], None]:
    """In a worker: call the result with the work done (tokens, say) in the round that ended; it waits for the next."""
    begun: list[float] = []

    def turn(work: float) -> None:
        if begun:
            print(json.dumps({"work": work, "seconds": time.perf_counter() - begun[0]}), flush=True)
        line = sys.stdin.readline()
        if line.strip() != "go":
            raise SystemExit(0)
        begun[:] = [time.perf_counter()]

    return turn


def race(commands: dict[str, Sequence[str]], rounds: int, warmup: int = 2) -> dict[str, float]:
    """Work per second of each command, the median over rounds taken in turn."""
    workers = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(warmup + rounds):
        for name, worker in workers.items():
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
            for line in worker.stdout:  # what libraries print is not for us
                if line.startswith('{"work"'):
                    answer = json.loads(line)
                    if number >= warmup:
                        rates[name].append(answer["work"] / answer["seconds"])
                    break
            else:
                raise RuntimeError(f"{name} ended early with code {worker.wait()}")
    for worker in workers.values():
        worker.communicate("stop\n", timeout=60)
    return {name: statistics.median(values) for name, values in rates.items()}
