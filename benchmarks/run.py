"""`make bench`: every benchmark that runs on this machine, one after the other."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("benchmarks.core", "benchmarks.hub", "benchmarks.training", "benchmarks.decoding", "benchmarks.finetune")

for module in BENCHMARKS:
    subprocess.run([sys.executable, "-m", module], check=True)
