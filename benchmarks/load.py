"""A server under load: clients that ask, hang up, dawdle and talk nonsense, all at once, for minutes.

    python -m benchmarks.load --minutes 10 [MODEL ...]

Without a model, four small random ones are made: two decoders, an encoder-decoder and an encoder. The test fails where
the server says 500, gives another answer than the model gives alone, holds on to a place or to a file, or grows.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import sublayer
from benchmarks.load_clients import Client, Wrong
from benchmarks.load_models import Case, build, cases
from benchmarks.timing import machine
from sublayer.serving import named

# How often each kind of client comes; the others are fewer than those that want an answer.
KINDS = {
    "ask": 50, "hang_up": 18, "form": 10, "nonsense": 10, "mutate": 8, "slow": 6, "keyless": 3, "garbage": 3,
    "huge": 2, "stall": 2,
}  # fmt: skip
SETTINGS = ("--max-batch", "8", "--queue", "32", "--timeout", "60")
GROWTH = 12 << 20  # bytes that the server may grow by after its warm-up
WARMUP = 0.3  # of the whole time
SOAK = 120  # seconds; a shorter run is all warm-up, and nothing is said of its memory
# What takes most memory for a moment, many times over: malloc keeps what was ever needed at once, and by chance alone
# it would be long until that is most. It also fills the server's cache of compiled grammars.
STRETCH = {"nonsense": 600, "huge": 40, "form": 60}
BEYOND = "positive_data_acceptance"  # no schema can say how many tokens a text has, and too many are refused


@dataclass
class Report:
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # requests by kind and status
    faults: list[str] = field(default_factory=list)
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)  # seconds, bytes, files, tokens made
    fuzzed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, status: str) -> None:
        with self.lock:
            self.counts[kind, status] += 1

    def fault(self, message: str) -> None:
        with self.lock:
            self.faults.append(message[:4000])


class Process:
    """`sublayer serve` as a process of its own, on a port that it chooses."""

    def __init__(self, models: list[str], errors: Path, *options: str) -> None:
        self.key, self.errors = secrets.token_hex(8), errors
        command = [sys.executable, "-m", "sublayer", "serve", *models, "--port", "0", *options]
        with errors.open("w") as sink:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=sink, text=True, env=os.environ | {"SUBLAYER_API_KEY": self.key}
            )
        assert self.process.stdout is not None
        told = ""
        for line in self.process.stdout:
            told = line
            if line.startswith("listening on"):
                break
        else:
            raise RuntimeError(f"the server did not start: {errors.read_text()[-500:]}")
        self.port = int(re.search(r":(\d+)/v1", told)[1])  # type: ignore[index]

    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def total(self, name: str) -> float:
        """The sum of one metric over all models."""
        headers = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics", headers=headers)
        text = urllib.request.urlopen(request, timeout=60).read().decode()
        return sum(float(value) for value in re.findall(rf"^sublayer_{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def run(minutes: float, models: list[str] | None = None, *, clients: int = 24, seed: int = 0) -> Report:
    """Everything at once until the time is over, and then what is left behind."""
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = models or [str(path) for path in build(folder).values()]
        loaded = {name: sublayer.load(path) for name, path in named(models).items()}
        questions = [case for name, lm in loaded.items() for case in cases(name, lm)]
        endless = next((name for name, lm in loaded.items() if lm.config.shape != "encoder"), None)
        if endless is None:
            raise ValueError("encoders alone have no answers to hang up on; give a decoder or an encoder-decoder, too")
        server = Process(models, folder / "stderr", *SETTINGS)
        stack.callback(server.process.kill)
        server.total("running")  # it answers: what it opens to listen is open
        files = server.files()
        if 60 * minutes > SOAK:
            with ThreadPoolExecutor(clients) as pool:
                several = [Client(server.port, server.key, questions, endless, -number) for number in range(clients)]
                list(pool.map(_stretch, several))
        end = time.monotonic() + 60 * minutes
        workers = [
            threading.Thread(target=_work, args=(report, server, questions, endless, seed * 1000 + number, end))
            for number in range(clients)
        ]
        workers.append(threading.Thread(target=_fuzz, args=(report, server, seed, end)))
        for worker in workers:
            worker.daemon = True
            worker.start()
        _watch(report, server, end)
        for worker in workers:
            worker.join(120)
            if worker.is_alive():
                report.fault("a client never got an answer")
        _aftermath(report, server, files)
    return report


def _stretch(client: Client) -> None:
    for kind, times in STRETCH.items():
        for _ in range(times):
            getattr(client, kind)()


def _work(report: Report, server: Process, questions: list[Case], endless: str, seed: int, end: float) -> None:
    client = Client(server.port, server.key, questions, endless, seed)
    kind = list(KINDS)[seed % len(KINDS)]  # so that each comes once at least
    while time.monotonic() < end:
        try:
            report.add(kind, getattr(client, kind)())
        except Wrong as wrong:
            report.add(kind, "wrong")
            report.fault(f"{kind}: {wrong}")
        except Exception as error:
            report.add(kind, "failed")
            report.fault(f"{kind}: {type(error).__name__}: {error}")
        (kind,) = client.random.choices(list(KINDS), list(KINDS.values()))


def _fuzz(report: Report, server: Process, seed: int, end: float) -> None:
    while (left := end - time.monotonic()) > 5:
        seed += 1
        done = fuzz(server.port, server.key, seed, server.errors.parent, "--max-time", str(int(min(left - 4, 60))))
        found = re.search(r"(\d+) generated", done.stdout)
        report.fuzzed += int(found[1]) if found else 0
        if done.returncode:
            report.fault(f"schemathesis, seed {seed}: {done.stdout[-3000:]}{done.stderr[-500:]}")


def fuzz(port: int, key: str, seed: int, folder: Path, *limit: str) -> subprocess.CompletedProcess[str]:
    """Schemathesis reads /openapi.json, and tries what it says and what it forbids; it leaves its notes in a folder."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"http://127.0.0.1:{port}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {key}", "--exclude-checks", BEYOND, "--phases", "coverage,fuzzing"]
    command += ["--seed", str(seed), "--request-timeout", "60", "--no-color", *limit]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def _watch(report: Report, server: Process, end: float) -> None:
    start = time.monotonic()
    while (now := time.monotonic()) < end:
        report.samples.append((now - start, server.memory(), server.files(), server.total("generated_tokens_total")))
        time.sleep(max(0.0, min((end - start) / 60, end - now)))


def _aftermath(report: Report, server: Process, files: int) -> None:
    """Nothing is left of those who came: no place, no token, no file, and no more memory than it takes to answer."""
    patience = time.monotonic() + 30
    while (left := {name: server.total(name) for name in ("running", "waiting", "cached_tokens")}) and any(
        left.values()
    ):
        if time.monotonic() > patience:
            report.fault(f"left behind: {left}")
            break
        time.sleep(0.2)
    while server.files() > files and time.monotonic() < patience:
        time.sleep(0.2)  # connections that are kept open for a while
    if server.files() > files:
        report.fault(f"{server.files()} files are open, {files} were at the start")
    grown = growth(report)
    if grown > GROWTH and report.samples[-1][0] > SOAK:
        report.fault(f"the server grew by {grown / 2**20:.1f} MiB after its warm-up")
    status = server.stop()
    if status not in (0, -signal.SIGTERM):
        report.fault(f"the server ended with status {status}")
    told = server.errors.read_text()
    if "Traceback" in told:
        report.fault(f"the server wrote: {told[-3000:]}")


def growth(report: Report) -> float:
    """The last tenth of the samples against the first tenth after the warm-up, by their medians."""
    sizes = [size for _, size, _, _ in report.samples]
    start, count = int(WARMUP * len(sizes)), max(1, len(sizes) // 10)
    return statistics.median(sizes[-count:]) - statistics.median(sizes[start : start + count])


def show(report: Report) -> None:
    print(f"{'minutes':>8} {'resident MiB':>13} {'open files':>11} {'tokens':>10}")
    for seconds, size, files, tokens in report.samples[:: max(1, len(report.samples) // 20)]:
        print(f"{seconds / 60:8.2f} {size / 2**20:13.1f} {files:11} {tokens:10,.0f}")
    print(f"\n{'client':<10} {'status':<16} {'requests':>9}")
    for (kind, status), count in sorted(report.counts.items()):
        print(f"{kind:<10} {status:<16} {count:9,}")
    seconds, tokens = report.samples[-1][0], report.samples[-1][3] - report.samples[0][3]
    print(
        f"\n{sum(report.counts.values()):,} requests, and {report.fuzzed:,} of schemathesis, in {seconds / 60:.1f} min"
    )
    print(f"{tokens / max(seconds, 1):,.0f} tokens/s; grown by {growth(report) / 2**20:+.1f} MiB after the warm-up")
    for fault in report.faults:
        print(f"FAULT {fault}")
    print("no fault" if not report.faults else f"{len(report.faults)} faults")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="FOLDER or NAME=FOLDER, as for sublayer serve")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(machine())
    report = run(given.minutes, given.models, clients=given.clients, seed=given.seed)
    show(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
