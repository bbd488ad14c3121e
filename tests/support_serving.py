"""Small random models behind a server, for the tests that talk to it."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from sublayer.data import Tokenizer
from sublayer.lm import LM
from sublayer.serving import make_server
from support import model_of, small

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROMPTS = ["The quick", "Paris is the capital of France, and", "今天天气 🚀", "a"]


def save(folder: Path, preset: str, **changes: Any) -> Path:
    """A random model over bytes, two of which are special tokens that begin and end a text."""
    alphabet = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<end>"])
    if changes.get("head") != "lm" and preset == "bert-base":
        backend.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    model = model_of(small(preset, vocab_size=258, **({"eos_id": 1} | changes)))
    LM(model, Tokenizer(backend, {"eos_token": "<end>", "pad_token": "<pad>"})).save(folder)
    return folder


def save_all(root: Path) -> dict[str, Path]:
    """A decoder that chats, one that never ends by itself, an encoder-decoder and an encoder."""
    save(root / "tiny", "llama-2-7b", max_positions=1200)
    (root / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    save(root / "endless", "gpt2", max_positions=1500, eos_id=None)
    save(root / "pairs", "t5-small", max_positions=64)
    save(root / "vectors", "bert-base", max_positions=64, head="none", eos_id=None)
    return {path.name: path for path in root.iterdir()}


class Running:
    """A server in a thread, on a port of its own."""

    def __init__(self, models: list[str], **settings: Any) -> None:
        self.server = make_server(models, **settings)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=20, **more)

    def number(self, name: str) -> float:
        """The value of one line of /metrics."""
        text = httpx.get(f"{self.address}/metrics").text
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def until(self, name: str, value: float) -> None:
        end = time.monotonic() + 10
        while self.number(name) != value:
            assert time.monotonic() < end, f"{name} is {self.number(name)}, never {value}"
            time.sleep(0.02)

    def slow(self, name: str, pause: float = 0.004) -> None:
        """Steps of a larger model, so that what a test does in the middle of an answer is in its middle."""
        slots = self.server.engines[name].slots
        decode = type(slots).decode
        slots.decode = lambda: (time.sleep(pause), decode(slots))[1]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
