"""One base, several adapters, one server: each request is answered by the adapter it names, in one batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sublayer
from sublayer import lora
from support_serving import PROMPTS, Running, save, save_all


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """Two adapters of each base, one of which trains the embeddings and the output too."""
    root = tmp_path_factory.mktemp("served")
    (root / "bases").mkdir()
    out = {name: path for name, path in save_all(root / "bases").items() if name != "endless"}
    for base in list(out):
        for number, options in enumerate(({}, {"train_also": ["tokens"]})):
            model = sublayer.load_model(out[base])
            lora.add(model, rank=4, alpha=32, **options)
            torch.manual_seed(number)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            folder = root / f"{base}{number}"
            lora.save(model, folder, base=str(out[base]))
            out[folder.name] = folder
    return out


@pytest.fixture(scope="module")
def server(folders):
    running = Running([f"{name}={folder}" for name, folder in folders.items()])
    yield running
    running.stop()


def test_one_engine_for_a_base_and_its_adapters(server, folders):
    assert {model.id for model in server.client().models.list()} == set(folders)
    engines = server.server.engines
    assert len({id(engine) for engine in engines.values()}) == 3
    assert engines["tiny"] is engines["tiny0"] is engines["tiny1"]


@pytest.mark.parametrize("base", ["tiny", "pairs"])
def test_requests_at_once_get_the_answer_of_their_adapter(base, server, folders):
    names = [base, f"{base}0", f"{base}1"]
    expected = {}
    for name in names:
        lm = sublayer.load(folders[name])
        expected |= {(name, prompt): lm.generate(prompt, max_new_tokens=12) for prompt in PROMPTS}
    assert len({expected[name, PROMPTS[1]] for name in names}) == 3
    found = {}

    def ask(name: str, prompt: str) -> None:
        reply = server.client().completions.create(model=name, prompt=prompt, max_tokens=12, temperature=0)
        found[name, prompt] = reply.choices[0].text

    threads = [threading.Thread(target=ask, args=pair) for pair in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_vectors_of_adapters(server, folders):
    for name in ("vectors", "vectors0", "vectors1"):
        expected = sublayer.load(folders[name]).embed(PROMPTS)
        reply = server.client().embeddings.create(model=name, input=PROMPTS)
        torch.testing.assert_close(torch.tensor([one.embedding for one in reply.data]), expected, rtol=1e-4, atol=1e-5)


def test_adapters_without_their_base(folders):
    """The base is loaded for them, once, and not served under a name of its own."""
    running = Running([f"one={folders['tiny0']}", f"two={folders['tiny1']}"])
    assert {model.id for model in running.client().models.list()} == {"one", "two"}
    for name, folder in (("one", "tiny0"), ("two", "tiny1")):
        reply = running.client().completions.create(model=name, prompt="The quick", max_tokens=8, temperature=0)
        expected = sublayer.load(folders[folder]).generate("The quick", max_new_tokens=8)
        assert reply.choices[0].text == expected
    running.stop()


def test_an_adapter_of_another_base_is_refused(folders, tmp_path):
    other = save(tmp_path / "other", "gpt2", max_positions=64)
    model = sublayer.load_model(folders["tiny"])
    lora.add(model)
    lora.save(model, tmp_path / "adapter", base=str(other))
    with pytest.raises(ValueError, match="adapter"):
        Running([str(other), str(tmp_path / "adapter")])
