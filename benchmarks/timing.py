"""Interleaved timing: machines are shared and noisy, so contenders take turns and medians are compared."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch


def interleave(contenders: dict[str, Callable[[], object]], rounds: int = 15, warmup: int = 2) -> dict[str, float]:
    """Median seconds of each, every contender once a round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + warmup):
        for name, work in contenders.items():
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        where = f"{torch.get_num_threads()} threads of a {platform.machine()} CPU"
    return f"{where}, torch {torch.__version__.split('+')[0]}, {datetime.date.today()}"


def show(title: str, medians: dict[str, float], baseline: str) -> None:
    """A row a contender: its median, and how many times as fast as the baseline it is."""
    print(f"\n{title}")
    for name, seconds in medians.items():
        print(f"  {name:<34} {seconds * 1e3:10.2f} ms   {medians[baseline] / seconds:5.2f}×")
