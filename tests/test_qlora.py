"""QLoRA: weights in 4 or 8 bits against the paper, against `transformers` and `peft`, and against whole weights."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pathlib
import sys
import weakref
from typing import Any

import bitsandbytes
import hypothesis.strategies as st
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from safetensors.torch import load_file

import sublayer
from sublayer import lora
from sublayer.core.layers import Linear
from sublayer.core.quantized import Quantized, library, quantize_blocks
from sublayer.lora.targets import Names
from sublayer.training.trainer import Trainer, recompute
from support import FAMILIES, example, model_of, seeded, small
from support_training import LABELLED, losses, write_rows
from test_finetune import Killed, finetune, folder_of
from test_hub import answer, inputs_of, reference
from test_lora import calm, stir

# The sixteen values of Dettmers et al. 2023, appendix E.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
# Multiples of 64 all: with other widths, bitsandbytes 0.50 on a CPU with AVX-512 reads its own blocks wrongly.
CASES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32)),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(
        vocab_size=40, n_embd=64, n_head=2, n_layer=2, n_positions=32, bos_token_id=0, eos_token_id=1)),
    "t5": ("T5ForConditionalGeneration", transformers.T5Config(
        vocab_size=40, d_model=64, d_kv=32, num_heads=2, d_ff=128, num_layers=2)),
    "bert": ("BertForSequenceClassification", transformers.BertConfig(**SIZES)),
}  # fmt: skip
# What transformers keeps whole: it always does T5's `wo`.
WHOLE = {"llama": ["lm_head"], "gpt2": ["lm_head"], "t5": ["lm_head", "wo"], "bert": ["pooler.dense", "classifier"]}
BITS = pytest.mark.parametrize("bits", [4, 8])


pytestmark = pytest.mark.usefixtures("quiet")


class Pair:
    """A random model that transformers holds in few bits, and the same model here."""

    def __init__(
        self, case: str, folder: pathlib.Path, bits: int, *, double: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        name, config = CASES[case]
        model = reference(name, config).to(dtype)
        for key, parameter in model.named_parameters():
            if key.endswith("Attention.q.weight"):
                parameter.data *= 32**-0.5  # T5's queries carry the scale that its scores lack
        model.save_pretrained(folder / "base")
        asked: dict[str, Any] = {"load_in_8bit": True}
        if bits == 4:
            asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
            asked |= {"bnb_4bit_compute_dtype": dtype}
        self.theirs = getattr(transformers, name).from_pretrained(
            folder / "base", dtype=dtype, device_map=str(torch.get_default_device()), attn_implementation="eager",
            quantization_config=transformers.BitsAndBytesConfig(**asked, llm_int8_skip_modules=WHOLE[case]),
        )  # fmt: skip
        self.ours = sublayer.load_model(folder / "base")
        lora.quantize(self.ours, bits, double=double, compute_dtype=dtype, skip=["wo"] if case == "t5" else ())
        calm(self.theirs)
        calm(self.ours)
        self.keywords, self.inputs, _ = inputs_of(self.theirs, False)


def decoded(layer: Any) -> torch.Tensor:
    """The matrix that a layer of bitsandbytes stands for, in its own words."""
    if isinstance(layer, bitsandbytes.nn.Linear4bit):
        return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


def only_weights_rounded(model: Any, dtype: torch.dtype = torch.float32) -> None:
    """On a GPU bitsandbytes rounds the other side of an 8-bit product too; a plain layer with its matrix does not."""
    for path, part in list(model.named_modules()):
        if isinstance(part, bitsandbytes.nn.Linear8bitLt) and part.weight.is_cuda:
            layer = torch.nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, dtype=dtype)
            layer.weight.data, layer.bias = decoded(part).to(dtype), part.bias
            model.set_submodule(path, layer.requires_grad_(False))


def near(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """In parts of the largest value."""
    scale = float(expected.detach().abs().max()) or 1.0
    torch.testing.assert_close(out / scale, expected / scale, rtol=tolerance, atol=tolerance)


def coded(model: Any) -> dict[str, Quantized]:
    return {path: part for path, part in model.named_modules() if isinstance(part, Quantized)}


def twin(model: Any) -> Any:
    """A model of plain layers with the matrices that the codes stand for."""
    out = copy.deepcopy(model)
    for path, part in coded(out).items():
        layer = Linear(part.in_features, part.out_features, bias=part.bias is not None)
        layer.weight.data, layer.bias = part.weight, part.bias
        out.set_submodule(path, layer.requires_grad_(False).train(part.training))
    return out


# The codes


def test_levels_are_quantiles_of_the_normal_distribution():
    """Seven below zero and eight above, equally far apart in probability, then brought to [-1, 1] (section 3)."""
    edge = (1 - 1 / 32 + 1 - 1 / 30) / 2
    below = -torch.special.ndtri(torch.linspace(edge, 0.5, 8, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(edge, 0.5, 9, dtype=torch.float64)[:-1]).flip(0)
    levels = torch.cat((below, torch.zeros(1, dtype=torch.float64), above)) / above.max()
    torch.testing.assert_close(NF4, levels.float(), rtol=0, atol=1e-6)


@given(rows=st.integers(1, 200), pairs=st.integers(1, 70), seed=st.integers(0, 2**20), size=st.floats(-6, 4))
@settings(max_examples=60, deadline=None)
def test_each_weight_is_the_nearest_level(rows, pairs, seed, size):
    """Of sixteen, times the largest of its block of 64; its own rounding is all that a second quantisation adds."""
    layer = Linear(2 * pairs, rows)
    layer.weight.data = torch.randn(rows, 2 * pairs, generator=seeded(seed)) * 10**size
    weight = layer.weight.detach().clone()
    once, twice = (held(layer, 4, double=double).weight.flatten() for double in (False, True))
    scales = torch.stack([block.abs().max() for block in weight.flatten().split(64)])
    each = scales.repeat_interleave(64)[: weight.numel()]
    distance = (NF4 - (weight.flatten() / each)[:, None]).abs()
    chosen = (NF4 - (once / each)[:, None]).abs()
    assert chosen.min(1).values.max() < 1e-6
    picked = distance.gather(1, chosen.argmin(1, keepdim=True))[:, 0]
    assert (picked <= distance.min(1).values + 1e-5).all()
    # The signed 8-bit code of scales has no gap wider than 1/64 of the largest.
    spread = (scales - scales.mean()).abs().max()
    assert ((twice - once).abs() <= spread / 100 + each * 1e-5).all()


@given(rows=st.integers(1, 5), columns=st.integers(1, 90), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_eight_bits_are_steps_of_the_largest_of_a_row(rows, columns, seed):
    layer = Linear(columns, rows)
    layer.weight.data = torch.randn(rows, columns, generator=seeded(seed))
    weight = layer.weight.detach().clone()
    step = weight.abs().amax(1, keepdim=True) / 127
    out = held(layer, 8).weight
    torch.testing.assert_close(out / step, (out / step).round(), rtol=0, atol=0.1)  # the step itself is in float16
    assert ((out - weight).abs() <= step * 0.57).all()


def held(layer: Linear, bits: int, **options: Any) -> Any:
    model = torch.nn.ModuleDict({"stack": torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([copy.deepcopy(layer)])})})
    quantize_blocks(model, bits, **options)
    return model["stack"]["blocks"][0]


@pytest.mark.parametrize("double", [True, False])
def test_bytes(double):
    """Half a byte for a weight and 8 bits for 64 of them, or 32; the paper's table 0.5 + 0.127/8 bytes at full size."""
    model = model_of(small("llama-7b", d_model=256, d_ff=512))
    before, whole = model.num_parameters(), weakref.ref(model.decoder.blocks[0].attention.sublayer.query.weight)
    lora.quantize(model, 4, double=double)
    gc.collect()
    assert whole() is None and model.num_parameters() == before
    for layer in coded(model).values():
        count = layer.in_features * layer.out_features
        blocks = count // 64
        statistics = blocks + 4 * math.ceil(blocks / 256) + 4 + 4 * 256 if double else 4 * blocks
        assert sum(buffer.nbytes for buffer in layer.buffers()) == count // 2 + statistics
    assert not any(".blocks." in name and parameter.dim() > 1 for name, parameter in model.named_parameters())
    assert len(coded(model)) == 2 * 7 and not isinstance(model.head.logits, Quantized)


# Against transformers and PEFT


@BITS
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_same_weights_as_transformers(case, bits, double, tmp_path):
    """Bit for bit; but the scales of a matrix that is fused there share a mean that those of its parts do not."""
    pair = Pair(case, tmp_path, bits, double=double)
    names, layers = Names.of(pair.ours), coded(pair.ours)
    modules = {names.modules[path]: names.group(path) for path in layers}
    theirs = {path for path, part in pair.theirs.named_modules() if type(part).__module__.startswith("bitsandbytes")}
    assert theirs == {*modules}
    for module, group in modules.items():
        expected = decoded(pair.theirs.get_submodule(module))
        found = torch.cat([layers[path].weight for path in group])
        if len(group) > 1 and bits == 4 and double:
            torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-6)
        else:
            assert torch.equal(found, expected)


@BITS
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_adapter_equals_that_of_peft(case, dora, bits, tmp_path):
    """The same logits and the same gradients; what we write gives them again there."""
    pair = Pair(case, tmp_path, bits, double=case != "gpt2")
    only_weights_rounded(pair.theirs)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=dora, target_modules="all-linear", exclude_modules=WHOLE[case])
    theirs = peft.get_peft_model(pair.theirs, config)
    stir(theirs)
    theirs.save_pretrained(tmp_path / "a")
    lora.load(pair.ours, tmp_path / "a", trainable=True)
    calm(pair.ours)
    codes = copy.deepcopy(dict(pair.ours.named_buffers()))
    expected, found = answer(theirs.train()(**pair.keywords)), pair.ours.train()(*pair.inputs)
    near(found, expected, 1e-5)
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert all(torch.equal(codes[name], buffer) for name, buffer in pair.ours.named_buffers())
    assert all(p.grad is None for name, p in pair.ours.named_parameters() if ".lora." not in name)

    lora.save(pair.ours, tmp_path / "b")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    with torch.no_grad():
        for parameter in [*theirs.parameters(), *pair.ours.parameters()]:
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "a")
    lora.save(pair.ours, tmp_path / "b")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    for key, value in one.items():
        near(two[key], value, 5e-5)


@BITS
def test_in_bfloat16(bits, tmp_path):
    """As near to PEFT's as its own rounding leaves room for; the matrices that learn are in float32."""
    pair = Pair("llama", tmp_path, bits, dtype=torch.bfloat16)
    only_weights_rounded(pair.theirs, torch.bfloat16)
    theirs = peft.get_peft_model(pair.theirs, peft.LoraConfig(r=3, target_modules="all-linear"))
    stir(theirs)
    theirs.save_pretrained(tmp_path / "a")
    lora.load(pair.ours, tmp_path / "a", trainable=True)
    expected, found = answer(theirs.train()(**pair.keywords)), pair.ours.train()(*pair.inputs)
    assert found.dtype == torch.bfloat16
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < 0.03
    found.float().square().mean().backward()
    assert {p.grad.dtype for p in pair.ours.parameters() if p.requires_grad} == {torch.float32}


# Against the same model with whole matrices


@BITS
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_its_dense_twin(family, bits):
    """Logits and gradients of every family, with blocks computed twice as without."""
    model = model_of(small(family))
    lora.quantize(model, bits, compute_dtype=torch.float32)
    dense = twin(model)
    assert not coded(dense)
    inputs = example(model.config)
    gradients = []
    for one in (model, dense):
        torch.manual_seed(0)
        lora.add(one, rank=2)
        stir(one)
        recompute(one)
        out = one.train()(*inputs)
        out.float().square().mean().backward()
        gradients.append([out, *(p.grad for p in one.parameters() if p.requires_grad)])
    for found, expected in zip(*gradients, strict=True):
        near(found, expected, 1e-5)


@BITS
@pytest.mark.parametrize("family", ["gpt2", "t5-base"])
def test_generates_as_its_dense_twin(family, bits):
    """Weights large enough to be packed for a CPU are packed in the twin, and not here."""
    model = model_of(small(family, d_model=256, d_ff=512))
    lora.quantize(model, bits, compute_dtype=torch.float32)
    dense, ids = twin(model), example(model.config)[0]
    for options in ({}, {"num_beams": 3}):
        found, expected = (sublayer.generate(one, ids, max_new_tokens=8, **options) for one in (model, dense))
        assert torch.equal(found, expected)
    assert not any(getattr(layer, "packed", None) is not None for layer in coded(model).values())


@BITS
@torch.no_grad()
def test_packed_tokens(bits):
    model = model_of(small("llama-7b"))
    lora.quantize(model, bits)
    ids, mask = example(model.config, length=9)[0], torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    packed = model(ids[mask], packing=sublayer.Packing.from_lengths([9, 5]))
    torch.testing.assert_close(packed, model(ids, mask=mask)[mask], rtol=1e-4, atol=1e-5)


@BITS
@pytest.mark.parametrize("automatic", [False, True])
def test_computes_in_the_dtype_asked_for(bits, automatic):
    """bfloat16 by its own setting or by autocast: the product rounded once, and gradients through it."""
    layer = Linear(64, 48)
    one = held(layer, bits, compute_dtype=None if automatic else torch.bfloat16)
    x = torch.randn(3, 5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16) if automatic else contextlib.nullcontext():
        out = one(x)
    assert out.dtype == torch.float32
    (gradient,) = torch.autograd.grad(out.sum(), x)
    half = x.detach().bfloat16().requires_grad_()
    expected = F.linear(half, one.weight.bfloat16(), one.bias.bfloat16())
    torch.testing.assert_close(out, expected.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), half)[0].float(), rtol=1e-2, atol=1e-2)


# In use


@BITS
def test_learns_and_leaves_the_base_alone(bits):
    torch.manual_seed(0)
    model = model_of(small("llama-7b"))
    model.head.logits.weight.data *= 20  # tokens as far apart as training leaves them
    lora.quantize(model, bits)
    before = copy.deepcopy(model.state_dict())
    lora.add(model, rank=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = example(model.config, length=12)[0]
    seen = []
    for _ in range(30):
        loss = F.cross_entropy(model.train()(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    assert seen[-1] < 0.5 * seen[0]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    lora.remove(model, "default")
    assert model.state_dict().keys() == before.keys()


@BITS
@torch.no_grad()
def test_moves_copies_and_states(bits):
    """Another dtype for the rest rounds no scale; a copy and a state dict hold all there is."""
    model, other = (model_of(small("llama-7b"), seed=seed) for seed in (0, 1))
    for one in (model, other):
        lora.quantize(one, bits)
    weights = {path: layer.weight for path, layer in coded(model).items()}
    half = copy.deepcopy(model).bfloat16()
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(layer.weight, weights[path]) for path, layer in coded(half).items())
    assert half(*example(model.config)).dtype == torch.bfloat16
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*example(model.config)), model(*example(model.config)))
    assert {buffer.device.type for buffer in copy.deepcopy(model).to("meta").buffers()} == {"meta"}


@pytest.mark.usefixtures("own_cache")
@BITS
def test_loaded_in_few_bits(bits, tmp_path):
    """The same as loaded and then quantised; an adapter goes around it, with a head of its own where it has one."""
    base = folder_of("encoder", tmp_path / "base")
    plain = sublayer.load_model(base)
    lora.quantize(plain, bits)
    found = sublayer.load_model(base, bits=bits)
    state = plain.state_dict()
    assert found.state_dict().keys() == state.keys() and not found.training
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())
    assert len(coded(sublayer.load(base, bits=bits).model)) == len(coded(found))

    data = write_rows(tmp_path / "data.jsonl", LABELLED)
    assert finetune(base, data, tmp_path / "run", "--lora=2", f"--bits={bits}", "train.lr=1e-2") == 0
    lm, whole = (sublayer.load(tmp_path / "run" / "model", **options) for options in ({"bits": bits}, {}))
    assert len(coded(lm.model)) == len(coded(found)) and not coded(whole.model)
    assert lora.names(lm.model) == ["default"] and lm.model.config == whole.model.config
    assert len(lm.classify("a red thing")) == len(whole.classify("a red thing")) > 1


@pytest.mark.usefixtures("own_cache")
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    data, base = write_rows(tmp_path / "data.jsonl", LABELLED), folder_of("gpt2", tmp_path / "base")
    more = ["--bits=4", "train.steps=7", "train.save_every=3", "train.lr=1e-2", "lora.dropout=0.1"]
    assert finetune(base, data, tmp_path / "straight", *more) == 0
    learn = Trainer.learn

    def killed(self: Trainer, batches: Any) -> None:
        if self.state.step == 4:
            raise Killed
        learn(self, batches)

    monkeypatch.setattr(Trainer, "learn", killed)
    with pytest.raises(Killed):
        finetune(base, data, tmp_path / "killed", *more)
    monkeypatch.setattr(Trainer, "learn", learn)
    assert finetune(base, data, tmp_path / "killed", *more, "--resume") == 0
    one, two = (tmp_path / run / "model" / "adapter_model.safetensors" for run in ("straight", "killed"))
    assert one.read_bytes() == two.read_bytes() and losses(tmp_path / "straight") == losses(tmp_path / "killed")
    saved = {file.name for file in (tmp_path / "straight").glob("checkpoints/*/*.safetensors")}
    assert saved == {"adapter_model.safetensors", "trainer.safetensors"}


# What is refused


def refused(message: str, call: Any, *inputs: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call(*inputs, **options)
    assert "\n" not in str(error.value)


def test_refusals(tmp_path):
    model = model_of(small("llama-7b"))
    refused("bits is 3; weights can be held in 4 bits or in 8", lora.quantize, model, 3)
    refused("unknown target 'qury'; did you mean 'query'", lora.quantize, model, skip=["qury"])
    refused("float64; only weights of 16 or 32 bits", lora.quantize, model_of(small("gpt2")).double())
    lora.quantize(model, skip=["query"])
    refused("in 4 bits already", lora.quantize, model, 8)
    refused(r"in 4 bits; save its adapter alone \(sublayer.lora.save\)", sublayer.save_model, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    refused("blocks.0.attention.sublayer.key is in 4 bits and cannot be trained", lora.add, model, train_also=["key"])
    lora.add(model, targets=["query"], train_also=["norm"])
    refused("quantise it first", lora.quantize, model)
    refused("in 4 bits, which cannot hold the sum.*convert MODEL OUT --merge ADAPTER", lora.merge, model)
    assert lora.names(model) == ["default"]  # and all is as it was
    refused("in 4 bits; save its adapter alone", sublayer.save_model, model, tmp_path / "out")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    library.cache_clear()
    try:
        refused(
            r"need the package 'bitsandbytes': pip install 'sublayer\[qlora\]'", lora.quantize, model_of(small("gpt2"))
        )
    finally:
        library.cache_clear()


@pytest.mark.usefixtures("own_cache")
def test_wrong_settings_of_a_run(tmp_path, capsys):
    data, base = write_rows(tmp_path / "data.jsonl", LABELLED), folder_of("gpt2", tmp_path / "base")
    assert finetune(base, data, tmp_path / "run", "lora.bits=3") == 1
    assert "lora.bits is 3; weights can be held in 4 bits or in 8" in capsys.readouterr().err
    assert finetune(base, data, tmp_path / "run", "--full", "--bits=4") == 1
    assert "--full trains all weights" in capsys.readouterr().err
