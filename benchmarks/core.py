"""The core against its peers: import, building the largest model, and a training step of three families.

python -m benchmarks.core
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import sublayer
from benchmarks.timing import interleave, machine, show

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def imports() -> None:
    def run(code: str):
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    codes = {
        "import torch": "import torch",
        "import sublayer": "import sublayer",
        "import sublayer, with the models": "import sublayer; sublayer.build; sublayer.generate",
    }
    show("import", interleave({name: run(code) for name, code in codes.items()}, rounds=7), "import torch")


def meta() -> None:
    start = time.perf_counter()
    sublayer.build(sublayer.preset("llama-2-70b"), device="meta")
    print(f"\nbuild llama-2-70b on meta: {time.perf_counter() - start:.2f} s")


def step(model: nn.Module, *inputs: torch.Tensor, labels: torch.Tensor):
    """Forward, loss and backward; the model gives logits, or an object that holds them."""

    def work() -> None:
        with torch.autocast(DEVICE, DTYPE, enabled=DEVICE == "cuda"):
            out = model(*inputs)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)

    return work


def decoders() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {"num_decoder_layers": 6, "d_model": 384, "num_heads": 6, "d_ff": 1536}
    sizes = {} if DEVICE == "cuda" else small
    batch, length = (16, 1024) if DEVICE == "cuda" else (4, 256)
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}

    config = dataclasses.replace(sublayer.preset("gpt2"), **sizes, **no_dropout)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_layer=config.num_decoder_layers, n_embd=config.d_model, n_head=config.num_heads, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    ).to(DEVICE)  # fmt: skip
    compare("GPT-2", config, theirs, batch, length)

    base = sublayer.preset("smollm2-135m")
    config = dataclasses.replace(base, **({} if DEVICE == "cuda" else {"num_decoder_layers": 6}), vocab_size=8192)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.num_decoder_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads, tie_word_embeddings=True, use_cache=False,
        )
    ).to(DEVICE)  # fmt: skip
    compare("LLaMA (SmolLM2 shape)", config, theirs, batch, length)


def compare(title: str, config: sublayer.ModelConfig, theirs: nn.Module, batch: int, length: int) -> None:
    ours = sublayer.build(config, device=DEVICE)
    ids = torch.randint(config.vocab_size, (batch, length), device=DEVICE)
    contenders = {"transformers": step(theirs, ids, labels=ids), "sublayer": step(ours, ids, labels=ids)}
    if DEVICE == "cuda":
        for name, model in (("transformers", theirs), ("sublayer", ours)):
            contenders[f"{name}, compiled"] = step(torch.compile(model), ids, labels=ids)
    show(f"train step, {title}, {batch} × {length}", interleave(contenders, rounds=9), "transformers")


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it leaves out: embeddings, positions and the output matrix."""

    def __init__(self, config: sublayer.ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Parameter(torch.randn(512, config.d_model))
        layers = config.num_encoder_layers
        self.body = nn.Transformer(
            config.d_model, config.num_heads, layers, layers, config.d_ff, dropout=0.0, batch_first=True
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        embedded = [self.tokens(ids) * 16 + self.positions[: ids.size(1)] for ids in (source, target)]
        causal = self.body.generate_square_subsequent_mask(target.size(1), device=target.device)
        out = self.body(*embedded, tgt_mask=causal, tgt_is_causal=True)
        return F.linear(out, self.tokens.weight)


def encoder_decoder() -> None:
    small = {"num_encoder_layers": 3, "num_decoder_layers": 3, "d_model": 256, "num_heads": 4, "d_ff": 1024}
    sizes = {} if DEVICE == "cuda" else small
    config = dataclasses.replace(sublayer.preset("original-base"), **sizes, vocab_size=16_000, dropout=0.0)
    ours, theirs = sublayer.build(config, device=DEVICE), TorchTransformer(config).to(DEVICE)
    batch, length = (400, 64) if DEVICE == "cuda" else (32, 48)
    ids = torch.randint(config.vocab_size, (batch, length), device=DEVICE)
    contenders = {
        "torch.nn.Transformer": step(theirs, ids, ids, labels=ids),
        "sublayer": step(ours, ids, ids, labels=ids),
    }
    if DEVICE == "cuda":
        contenders["torch.nn.Transformer, compiled"] = step(torch.compile(theirs), ids, ids, labels=ids)
        contenders["sublayer, compiled"] = step(torch.compile(ours), ids, ids, labels=ids)
    medians = interleave(contenders, rounds=9)
    show(f"train step, encoder-decoder, {batch} pairs × {length}", medians, "torch.nn.Transformer")


if __name__ == "__main__":
    print(machine())
    chosen = sys.argv[1:]  # names of some of them, or all
    for part in (imports, meta, encoder_decoder, decoders):
        if not chosen or part.__name__ in chosen:
            part()
