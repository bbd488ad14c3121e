"""Loading a folder of 1.1 billion parameters: time beside `transformers`, and memory above the model itself.

    python -m benchmarks.hub

Each load runs in a process of its own, imports not counted; the two take turns. `transformers` maps a file that needs
no conversion and leaves the reading to the first use; we look through it for NaN at once. So two times are given: when
the call returns, and when every weight has been read once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

import sublayer
from benchmarks.timing import machine

CODE = """
import json, resource, sys, time, torch
{imports}
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
before = resident()
start = time.perf_counter()
model = {load}
seconds = time.perf_counter() - start
total = sum(float(p.sum()) for p in model.parameters())
used = time.perf_counter() - start
size = sum(p.numel() * p.element_size() for p in model.parameters())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "used": used, "size": size, "above": peak - before - size}}))
"""
TRANSFORMERS = (
    "import transformers; transformers.logging.disable_progress_bar(); from transformers import LlamaForCausalLM",
    "LlamaForCausalLM.from_pretrained({folder!r}, dtype=torch.{dtype})",
)
OURS = ("import sublayer; sublayer.load_model", "sublayer.load_model({folder!r}, dtype='{dtype}')")


def measure(contender: tuple[str, str], folder: str, dtype: str) -> dict[str, float]:
    imports, load = contender
    code = CODE.format(imports=imports, load=load.format(folder=folder, dtype=dtype))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(rounds: int = 3) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        sublayer.save_model(sublayer.build(sublayer.preset("tinyllama-1.1b"), dtype="bfloat16"), folder)
        for dtype in ("bfloat16", "float32"):
            results: dict[str, list[dict[str, float]]] = {"transformers": [], "sublayer": []}
            for turn in range(rounds + 1):
                for name, contender in (("transformers", TRANSFORMERS), ("sublayer", OURS)):
                    result = measure(contender, folder, dtype)
                    if turn:  # the first round warms the page cache
                        results[name].append(result)
            print(f"\nload tinyllama-1.1b, stored as bfloat16, to {dtype}")
            medians = {
                name: [statistics.median(row[key] for row in rows) for key in ("seconds", "used")]
                + [statistics.median(row["above"] / row["size"] for row in rows)]
                for name, rows in results.items()
            }
            for name, (seconds, used, above) in medians.items():
                ratios = [medians["transformers"][n] / value for n, value in enumerate((seconds, used))]
                print(
                    f"  {name:<14} loaded {seconds:6.2f} s {ratios[0]:5.2f}×   every weight read {used:6.2f} s "
                    f"{ratios[1]:5.2f}×   peak above the model {above:6.1%}"
                )


if __name__ == "__main__":
    main()
