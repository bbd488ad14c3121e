"""Counts of what a server does, in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
COUNTERS = {
    "requests": "Answers and vectors asked for, by how they ended.",
    "prompt_tokens": "Tokens of prompts read.",
    "generated_tokens": "Tokens made.",
    "steps": "Steps of the model, each one token for every answer under way.",
    "rejected": "Requests turned away because the queue was full.",
}
TIMES = {
    "first_token_seconds": "From asking to the first token.",
    "request_seconds": "From asking to the end.",
}
GAUGES = {
    "running": "Answers under way.",
    "waiting": "Requests in the queue.",
    "slots": "Answers that can be under way at once.",
    "cached_tokens": "Tokens whose keys and values are held.",
}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Written to by the engines' threads, read by the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, int]] = {name: defaultdict(int) for name in COUNTERS}
        self._times: dict[str, dict[Labels, list[float]]] = {name: {} for name in TIMES}  # counts of buckets; sum
        self._gauges: dict[str, dict[Labels, Callable[[], int]]] = {name: {} for name in GAUGES}

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name][_key(labels)] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        with self._lock:
            row = self._times[name].setdefault(_key(labels), [0.0] * (len(BUCKETS) + 2))
            row[bisect_left(BUCKETS, seconds)] += 1
            row[-1] += seconds

    def gauge(self, name: str, read: Callable[[], int], **labels: str) -> None:
        """A number that is asked for whenever somebody looks."""
        with self._lock:
            self._gauges[name][_key(labels)] = read

    def mean(self, name: str, **labels: str) -> float | None:
        with self._lock:
            row = self._times[name].get(_key(labels))
            return None if row is None else row[-1] / sum(row[:-1])

    def text(self) -> str:
        lines: list[str] = []
        with self._lock:
            for name, told in COUNTERS.items():
                lines += [f"# HELP sublayer_{name}_total {told}", f"# TYPE sublayer_{name}_total counter"]
                lines += [f"sublayer_{name}_total{_braces(key)} {n}" for key, n in self._counts[name].items()]
            for name, told in GAUGES.items():
                lines += [f"# HELP sublayer_{name} {told}", f"# TYPE sublayer_{name} gauge"]
                lines += [f"sublayer_{name}{_braces(key)} {read()}" for key, read in self._gauges[name].items()]
            for name, told in TIMES.items():
                lines += [f"# HELP sublayer_{name} {told}", f"# TYPE sublayer_{name} histogram"]
                for key, row in self._times[name].items():
                    lines += _histogram(f"sublayer_{name}", key, row)
        return "\n".join(lines) + "\n"


def _histogram(name: str, key: Labels, row: list[float]) -> list[str]:
    lines, total = [], 0
    for edge, amount in zip((*map(str, BUCKETS), "+Inf"), row, strict=False):
        total += int(amount)
        lines.append(f"{name}_bucket{_braces((*key, ('le', edge)))} {total}")
    return [*lines, f"{name}_sum{_braces(key)} {row[-1]}", f"{name}_count{_braces(key)} {total}"]


def _key(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _braces(key: Labels) -> str:
    if not key:
        return ""
    escaped = ((name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in key)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
