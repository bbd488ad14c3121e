"""What a plan says, against what is there once the model is: its weights, its cache, and what autograd keeps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sublayer
from sublayer import lora
from sublayer.inspection.plan import LOGITS
from sublayer.training.loss import CHUNK_ELEMENTS
from support import FAMILIES, example, model_of, small

TEXT = ("original-base", "gpt2", "llama-7b", "llama-3.1-8b", "qwen3-0.6b", "t5-base", "bart-base", "bert-base")


def test_the_loss_holds_as_much_as_planned():
    assert CHUNK_ELEMENTS["cuda"] == LOGITS


THEIRS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "llama-7b": ("LlamaForCausalLM", "LlamaConfig", {}),
    "t5-base": (
        "T5ForConditionalGeneration", "T5Config", dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_parameters_are_those_of_transformers(name):
    kind, settings, sizes = THEIRS[name]
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, settings)(**sizes))
    expected = sum(parameter.numel() for parameter in model.parameters())
    plan = sublayer.plan(sublayer.preset(name), batch=1, seq=64)
    assert plan.parameters == plan.trainable == expected
    assert plan.weights_bytes == plan.gradients_bytes == 4 * expected and plan.optimizer_bytes == 8 * expected


@pytest.mark.parametrize("name", FAMILIES)
def test_adapter_and_coded_weights(name):
    """As many numbers learn as `lora.add` makes, and the bytes of weights are those the model then has."""
    config = small(name, d_model=256, d_ff=512, num_heads=4, head_dim=64)
    for bits in (None, 8, 4):
        model = sublayer.build(config, dtype=torch.bfloat16)
        if bits is not None:
            lora.quantize(model, bits)
        base = sum(tensor.nbytes for tensor in model.parameters())
        base += sum(tensor.nbytes for path, tensor in model.named_buffers() if path.rpartition(".")[2] in STORED)
        lora.add(model, rank=4)
        learns = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        plan = sublayer.plan(config, seq=16, lora_rank=4, bits=bits)
        if name == "gpt2":  # whose queries, keys and values are one matrix in PEFT, with one adapter
            assert learns < plan.trainable < 1.2 * learns
        else:
            assert plan.trainable == learns and plan.gradients_bytes == 4 * learns
        # The table of what codes of scales stand for is 1 KB a layer, much next to so small a matrix.
        assert plan.weights_bytes == pytest.approx(base + 4 * learns, rel=0.03)


STORED = ("codes", "scales", "scale_scales", "scale_mean")


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "t5-base"])
def test_cache(name):
    model = model_of(small(name)).to(torch.bfloat16)
    cache = sublayer.Cache(model.config, 3, 40, dtype=torch.bfloat16)
    plan = sublayer.plan(model.config, batch=3, seq=40, optimizer=None)
    assert plan.kv_cache_bytes == cache.bytes * 40 // 41  # a slot of each row is for padding
    assert plan.total_bytes == plan.weights_bytes + plan.activations_bytes + plan.kv_cache_bytes
    assert plan.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())


def kept_by(model, inputs):
    """Bytes that autograd saves for the backward pass of the features, weights left out, counted by hooks."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = model.features(*inputs)
    assert features.numel()
    return sum(kept.values())


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("adapter", [False, True])
def test_activations_are_what_autograd_keeps(name, adapter):
    """In float32, all blocks."""
    config = small(name, d_model=128, d_ff=384, num_heads=4, head_dim=32, vocab_size=61)
    model = model_of(config).train()
    if adapter:
        lora.add(model, rank=1)
    ids = torch.randint(2, 61, (2, 40))
    inputs = (ids, ids) if config.shape == "encoder-decoder" else (ids,)
    plan = sublayer.plan(config, batch=2, seq=40, dtype="float32", lora_rank=1 if adapter else None)
    loss = 2 * 40 * (config.output_vocab_size * 4 + 3 * 4 * config.d_model) if config.head in ("lm", "mlm") else 0
    assert plan.activations_bytes - loss == pytest.approx(kept_by(model, inputs), rel=0.25)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-base"])
def test_activations_of_an_adapter_beside_half_precision(name):
    """Under autocast the adapter reads what the layer reads, and keeps no copy. Few keys would be in float32."""
    config = small(name, d_model=128, d_ff=384, num_heads=4, head_dim=32, head="none", max_positions=512)
    model = model_of(config).to(torch.bfloat16).train()
    lora.add(model, rank=1)
    with torch.autocast(model.device.type, torch.bfloat16):
        kept = kept_by(model, (torch.randint(2, 50, (2, 300)),))
    if config.norm == "layernorm" and model.device.type == "cpu":  # on a GPU autocast would have it read float32
        kept += 2 * 600 * 128 * 2 * config.layers("encoder" if name == "bert-base" else "decoder")
    assert sublayer.plan(config, batch=2, seq=300, lora_rank=1).activations_bytes == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-base", "t5-base"])
def test_operations_are_those_that_torch_counts(name):
    config = dataclasses.replace(small(name, d_model=128, d_ff=384, num_heads=4, head_dim=32), vocab_size=512)
    config = dataclasses.replace(config, max_positions=64)
    model = model_of(config)
    inputs = tuple(torch.randint(2, 500, (1, 64)) for _ in example(config))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused one goes uncounted
        model(*inputs)
    plan = sublayer.plan(config, batch=1, seq=64, optimizer=None)
    assert plan.flops_per_token * 64 == pytest.approx(counter.get_total_flops(), rel=0.02)
    trained = sublayer.plan(config, batch=1, seq=64)
    assert trained.flops_per_token == pytest.approx(3 * plan.flops_per_token)


def test_shards_share_and_recomputing_saves():
    config = sublayer.preset("llama-7b")
    whole, part = (sublayer.plan(config, seq=2048, shards=shards) for shards in (1, 8))
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name) / 8, abs=1)
    assert part.activations_bytes == whole.activations_bytes
    assert sublayer.plan(config, seq=2048, recompute=True).activations_bytes < whole.activations_bytes / 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"bits": 4}, "do not learn"),
        ({"bits": 3, "lora_rank": 1}, "4 bits or in 8"),
    ],
)
def test_what_is_wrong(wrong, said):
    with pytest.raises(ValueError, match=said):
        sublayer.plan(sublayer.preset("gpt2"), **wrong)
