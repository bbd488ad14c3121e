"""LoRA against `peft`: adapters of random models of every family, written by one library and read by the other."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import sublayer
from sublayer import lora
from sublayer.cli import main
from sublayer.data import Tokenizer
from sublayer.models import Model
from sublayer.training.distributed import whole
from sublayer.training.trainer import recompute
from support import example, model_of, seeded, small
from test_hub import answer, inputs_of, reference

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 20}
LLAMA = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1}
PAIR = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32,
    "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 6, "num_heads": 2, "d_ff": 20, "num_layers": 2}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config, {
        "vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, LLAMA),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig, LLAMA),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config, LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, LLAMA | {"head_dim": 6}),
    "t5": ("T5ForConditionalGeneration", transformers.T5Config, T5),
    "flan": ("T5ForConditionalGeneration", transformers.T5Config, T5 | {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("BartForConditionalGeneration", transformers.BartConfig, PAIR),
    "marian": ("MarianMTModel", transformers.MarianConfig, PAIR),
    "bert": ("BertForSequenceClassification", transformers.BertConfig, SIZES),
    "mlm": ("BertForMaskedLM", transformers.BertConfig, SIZES),
    "body": ("BertModel", transformers.BertConfig, SIZES),
    "roberta": ("RobertaForSequenceClassification", transformers.RobertaConfig, SIZES),
    "distilbert": ("DistilBertForSequenceClassification", transformers.DistilBertConfig, {
        "vocab_size": 40, "dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 20}),
    "vit": ("ViTForImageClassification", transformers.ViTConfig, {
        "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 20,
        "image_size": 24, "patch_size": 8}),
}  # fmt: skip
# The module of each that has a name of its own for what comes out, and a norm, as PEFT would be told.
FULL = {
    "gpt2": ["wte", "lm_head", "ln_f"], "llama": ["embed_tokens", "lm_head", "norm"], "mistral": ["lm_head"],
    "qwen2": ["lm_head"], "qwen3": ["q_norm", "embed_tokens"], "t5": ["lm_head", "final_layer_norm"],
    "flan": ["lm_head"], "bart": ["lm_head"], "marian": ["lm_head"], "bert": ["classifier", "pooler.dense"],
    "mlm": ["transform.dense"], "body": ["LayerNorm"], "roberta": ["classifier"],
    "distilbert": ["pre_classifier", "classifier"], "vit": ["classifier", "layernorm_before"],
}  # fmt: skip
# Whose attention and norms transformers computes in float64 if asked to. In the others a softmax, the variance of a
# norm, or the angles of the positions are float32 whatever the model is, and two passes agree no better than that, even
# without an adapter.
EXACT = ("gpt2", "bart", "bert", "mlm", "body", "roberta", "distilbert")
KINDS = {"plain": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


pytestmark = pytest.mark.usefixtures("quiet")


class Pair:
    """A random model of transformers and the same model here."""

    def __init__(self, case: str, folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> None:
        name, config, sizes = CASES[case]
        self.theirs = reference(name, config(**sizes)).to(dtype)
        self.theirs.save_pretrained(folder / "base")
        self.ours = sublayer.load_model(folder / "base")
        self.keywords, self.inputs, _ = inputs_of(self.theirs, False)
        if "pixel_values" in self.keywords:
            self.inputs = (self.inputs[0].to(dtype),)
            self.keywords = {"pixel_values": self.inputs[0]}

    def fresh(self) -> Any:
        return copy.deepcopy(self.theirs)


def stir(model: Any, seed: int = 0, amount: float = 0.1) -> None:
    """Make an adapter as if it had been trained: nothing in it is zero, or what the base has."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator) * amount
                parameter.add_(noise.to(parameter))


def calm(model: Any) -> None:
    """No dropout, so that a pass in training is a function."""
    for part in model.modules():
        for key, value in vars(part).items():
            if ("dropout" in key or key == "p") and isinstance(value, float):
                setattr(part, key, 0.0)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(out / scale, expected / scale, rtol=1e-5, atol=1e-5)


def logits(pair: Pair, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*pair.inputs) if isinstance(model, Model) else answer(model(**pair.keywords))


def from_peft(pair: Pair, folder: pathlib.Path, **config: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(pair.fresh(), peft.LoraConfig(**({"r": 3, "lora_alpha": 5} | config))).eval()
    stir(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_adapter_of_peft(case, kind, tmp_path):
    """Read here it gives PEFT's logits; merged it gives the same; taken out again, the base is there bit for bit."""
    pair = Pair(case, tmp_path)
    theirs = from_peft(pair, tmp_path / "adapter", target_modules="all-linear", **KINDS[kind])
    base, state = logits(pair, pair.ours), copy.deepcopy(pair.ours.state_dict())
    lora.load(pair.ours, tmp_path / "adapter")
    expected = logits(pair, theirs)
    assert not torch.allclose(base, expected, atol=1e-3)
    close(logits(pair, pair.ours), expected)

    lora.merge(pair.ours)
    close(logits(pair, pair.ours), expected)
    assert pair.ours.state_dict().keys() == state.keys()
    lora.unmerge(pair.ours)
    close(logits(pair, pair.ours), expected)
    lora.use(pair.ours, None)
    assert torch.equal(logits(pair, pair.ours), base)
    lora.remove(pair.ours, "default")
    after = pair.ours.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[key], state[key]) for key in state)
    assert all(parameter.requires_grad for parameter in pair.ours.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_adapter_of_ours(case, kind, tmp_path):
    """A new one changes nothing; written here it gives the same logits in PEFT, and comes back as it was."""
    pair = Pair(case, tmp_path)
    base = logits(pair, pair.ours)
    options = {key.removeprefix("use_"): value for key, value in KINDS[kind].items()}
    lora.add(pair.ours, rank=3, alpha=5, **options)
    torch.testing.assert_close(logits(pair, pair.ours), base, rtol=0, atol=0 if kind != "dora" else 1e-5)
    stir(pair.ours)
    lora.save(pair.ours, tmp_path / "adapter")
    expected = logits(pair, pair.ours)
    close(logits(pair, peft.PeftModel.from_pretrained(pair.fresh(), tmp_path / "adapter").eval()), expected)

    again = sublayer.load_model(tmp_path / "base")
    lora.load(again, tmp_path / "adapter")
    assert torch.equal(logits(pair, again), expected)
    lora.save(again, tmp_path / "second")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, kind, tmp_path):
    """Equal to PEFT's, with modules trained in full beside the matrices; the base gets none."""
    pair = Pair(case, tmp_path, torch.float64)
    calm(pair.theirs)
    theirs = from_peft(pair, tmp_path / "a", target_modules="all-linear", modules_to_save=FULL[case], **KINDS[kind])
    state = copy.deepcopy(pair.ours.state_dict())
    lora.load(pair.ours, tmp_path / "a", trainable=True)
    calm(pair.ours)
    close(logits(pair, pair.ours), logits(pair, theirs))
    weights = torch.randn(logits(pair, theirs).shape)
    (answer(theirs.train()(**pair.keywords)) * weights).sum().backward()
    (pair.ours.train()(*pair.inputs) * weights).sum().backward()
    learns = [parameter for parameter in pair.ours.parameters() if parameter.requires_grad]
    assert lora.summary(pair.ours).trainable == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    with torch.no_grad():  # the gradient takes the place of the value, and is written as a value would be
        for parameter in learns:
            parameter.copy_(0.0 if parameter.grad is None else parameter.grad)  # a pooler that nothing calls has none
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                assert ".lora_" in name or "modules_to_save" in name
                parameter.copy_(0.0 if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "expected")
    lora.save(pair.ours, tmp_path / "found")
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("expected", "found"))
    assert expected.keys() == found.keys()
    tolerance = 1e-9 if case in EXACT else 5e-5
    for key, value in expected.items():
        scale = float(value.abs().max()) or 1.0
        torch.testing.assert_close(found[key] / scale, value / scale, rtol=tolerance, atol=tolerance)
    after = pair.ours.state_dict()
    assert all(torch.equal(after[key], value) for key, value in state.items())


def test_patterns_and_layers(tmp_path):
    """Ranks and alphas by module, some layers only, some modules left out: as PEFT saved them."""
    pair = Pair("llama", tmp_path)
    theirs = from_peft(
        pair, tmp_path / "a", target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=[1],
        rank_pattern={"q_proj": 5, r"layers\.1\.mlp.*": 2}, alpha_pattern={"v_proj": 7}, exclude_modules=["k_proj"],
    )  # fmt: skip
    lora.load(pair.ours, tmp_path / "a")
    close(logits(pair, pair.ours), logits(pair, theirs))
    lora.save(pair.ours, tmp_path / "b")
    close(logits(pair, peft.PeftModel.from_pretrained(pair.fresh(), tmp_path / "b").eval()), logits(pair, theirs))


@pytest.mark.parametrize("dora", [False, True])
def test_part_of_a_fused_matrix(dora, tmp_path):
    """GPT-2's query, key and value are one matrix. Two of them with an adapter are the same in PEFT, and come back."""
    pair = Pair("gpt2", tmp_path)
    lora.add(pair.ours, targets=["query", "value"], dora=dora)
    attention = pair.ours.decoder.blocks[0].attention.sublayer
    assert attention.query.lora.default.a is attention.value.lora.default.a
    stir(pair.ours)
    lora.save(pair.ours, tmp_path / "a")
    expected = logits(pair, pair.ours)
    close(logits(pair, peft.PeftModel.from_pretrained(pair.fresh(), tmp_path / "a").eval()), expected)
    again = sublayer.load_model(tmp_path / "base")
    lora.load(again, tmp_path / "a")
    assert again.state_dict().keys() == pair.ours.state_dict().keys()
    assert torch.equal(logits(pair, again), expected)


@pytest.mark.parametrize("case", ["gpt2", "qwen2", "t5", "bart", "marian", "mlm", "llama"])
def test_token_matrix(case, tmp_path):
    """Trained in full it stays tied where it is tied, in PEFT's folder and merged; only one copy learns."""
    pair = Pair(case, tmp_path)
    lora.add(pair.ours, targets=["query"], train_also=["embeddings.tokens"])
    adapters = sum(p.numel() for name, p in pair.ours.named_parameters() if name.endswith((".a", ".b")))
    bias = 40 if case == "mlm" else 0  # of the output matrix, which is the token matrix
    assert lora.summary(pair.ours).trainable == 40 * 16 + bias + adapters
    stir(pair.ours)
    expected = logits(pair, pair.ours)
    lora.save(pair.ours, tmp_path / "a")
    close(logits(pair, peft.PeftModel.from_pretrained(pair.fresh(), tmp_path / "a").eval()), expected)
    again = sublayer.load_model(tmp_path / "base")
    lora.load(again, tmp_path / "a", trainable=True)
    assert torch.equal(logits(pair, again), expected)
    assert lora.summary(again) == lora.summary(pair.ours)
    lora.merge(again, keep=False)
    assert again.config == pair.ours.config
    sublayer.save_model(again, tmp_path / "merged")
    plain = type(pair.theirs).from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    close(logits(pair, plain), expected)


def test_copy_of_one_of_two_tied(tmp_path):
    """PEFT gives the output matrix a copy of its own; merged, the two are no longer tied, until it is taken out."""
    pair = Pair("gpt2", tmp_path)
    theirs = from_peft(pair, tmp_path / "a", target_modules=["c_attn"], modules_to_save=["lm_head"])
    lora.load(pair.ours, tmp_path / "a")
    base = pair.ours.config
    lora.merge(pair.ours)
    assert base.tie_embeddings and not pair.ours.config.tie_embeddings
    sublayer.save_model(pair.ours, tmp_path / "merged")
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    close(logits(pair, plain), logits(pair, theirs))
    lora.unmerge(pair.ours)
    assert pair.ours.config == base
    assert pair.ours.head.logits.weight is pair.ours.decoder.embeddings.tokens.weight
    close(logits(pair, pair.ours), logits(pair, theirs))


def test_old_names(tmp_path):
    """transformers once called ViT's layers as its files still do."""
    pair = Pair("vit", tmp_path)
    theirs = from_peft(pair, tmp_path / "a", target_modules=["q_proj", "fc2"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    names = {"layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query", "mlp.fc2": "output.dense"}
    old = {}
    for key, value in load_file(path).items():
        for new, before in names.items():
            key = key.replace(new, before)
        old[key] = value
    save_file(old, path)
    lora.load(pair.ours, tmp_path / "a")
    close(logits(pair, pair.ours), logits(pair, theirs))


FAMILIES = ("gpt2", "llama-3.1-8b", "bert-base", "t5-base", "bart-base", "vit-b-16")


def adapted(family: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A model with three adapters, one of them of another kind and one with copies, and a batch of five."""
    torch.manual_seed(0)
    model = model_of(small(family))
    add_three(model)
    return model, example(model.config, batch=5)


def add_three(model: Any) -> None:
    head = "head" if model.config.head == "classifier" else "norm"
    kinds: list[dict[str, Any]] = [{}, {"dora": True, "targets": ["up"]}, {"train_also": [head]}]
    for number, (name, options) in enumerate(zip("abc", kinds, strict=True)):
        lora.add(model, rank=number + 1, name=name, **options)
        stir(model, number)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows(family):
    """In one batch each row is answered by its own adapter, as it would be alone."""
    model, inputs = adapted(family)
    wanted = ["b", None, "a", "c", "a"]
    expected = []
    for row, name in enumerate(wanted):
        lora.use(model, name)
        expected.append(model(*(x[row : row + 1] for x in inputs)))
    lora.use(model, "c")
    with lora.rows(model, wanted):
        torch.testing.assert_close(model(*inputs), torch.cat(expected), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="a batch of 3 rows came, and adapters were named for 5"):
            model(*(x[:3] for x in inputs))
    torch.testing.assert_close(model(*(x[3:4] for x in inputs)), expected[3])
    assert len({round(float(x.sum()), 4) for x in expected}) == 5  # no two adapters say the same


@torch.no_grad()
def test_rows_of_beams():
    model, inputs = adapted("llama-3.1-8b")
    lora.use(model, "a")
    expected = sublayer.generate(model, inputs[0][:1], max_new_tokens=5, num_beams=3)
    lora.use(model, None)
    other = sublayer.generate(model, inputs[0][1:2], max_new_tokens=5, num_beams=3)
    with lora.rows(model, ["a", None]):
        found = sublayer.generate(model, inputs[0][:2], max_new_tokens=5, num_beams=3)
    assert torch.equal(found, torch.cat([expected, other]))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_leaves_the_base(family):
    """Steps of the optimiser change the adapter in use, and nothing else: not the base, not the others."""
    model, inputs = adapted(family)
    lora.use(model, "c")
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model.train()(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if ".lora.c." in key}


@pytest.mark.parametrize("family", ["llama-3.1-8b", "bert-base"])
def test_compiled(family):
    """The compiler takes the whole model, with an adapter of each kind."""
    model, inputs = adapted(family)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name in ("c", "b"):
        lora.use(model, name)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed(family):
    """Activations computed again give the same gradients."""
    model, inputs = adapted(family)
    lora.use(model, "a")
    model(*inputs).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    recompute(model)
    model(*inputs).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys() and all(".lora.a." in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_packed():
    model, (ids,) = adapted("bert-base")
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1:, 4:] = False
    packed = model(ids[mask], packing=sublayer.Packing.from_lengths([7, 4, 4, 4, 4]))
    torch.testing.assert_close(packed, model(ids, mask=mask)[mask], rtol=1e-5, atol=1e-5)


def test_half_precision(tmp_path):
    """The adapter of a bfloat16 base is float32, as in PEFT, and is no further from the exact numbers."""
    pair = Pair("llama", tmp_path, torch.bfloat16)
    assert pair.ours.dtype == torch.bfloat16
    theirs = from_peft(pair, tmp_path / "a", target_modules="all-linear")
    lora.load(pair.ours, tmp_path / "a")
    assert {p.dtype for name, p in pair.ours.named_parameters() if ".lora." in name} == {torch.float32}
    found, reference = logits(pair, pair.ours), logits(pair, theirs)
    exact = logits(pair, theirs.float())
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().mean() <= 1.2 * (reference - exact).abs().mean()


def test_dropout():
    """It falls on what goes into the adapter, in training only, and keeps the mean."""
    model = model_of(small("gpt2"))
    lora.add(model, dropout=0.5, targets=["down"])
    stir(model)
    layer = model.decoder.blocks[0].feed_forward.sublayer.down
    x = torch.randn(4, 48)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    mean = torch.stack([layer(x) for _ in range(3000)]).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("family", "targets", "count"),
    [
        ("gpt2", None, 12), ("gpt2", "all-linear", 12), ("gpt2", ["c_attn"], 6), ("gpt2", "attention.output", 2),
        ("gpt2", ["c_proj"], 4), ("llama-7b", None, 14), ("llama-7b", ["q_proj", "value"], 4),
        ("llama-7b", "decoder.blocks.1.*", 7), ("llama-7b", r".*\.layers\.0\.mlp\..*_proj", 3),
        ("flan-t5-base", None, 36), ("flan-t5-base", "cross.query", 2), ("flan-t5-base", "SelfAttention.q", 4),
        ("bert-base", ["dense"], 7), ("vit-b-16", "query", 2), ("vit-b-16", ["q_proj"], 2),
        ("vit-b-16", ["classifier"], 1),
    ],
)  # fmt: skip
def test_targets(family, targets, count):
    """By our names, by those of transformers, by glob and by regular expression."""
    model = model_of(small(family))
    lora.add(model, targets=targets)
    assert sum(hasattr(part, "lora") for part in model.modules()) == count


def test_state_goes_into_another_model():
    """The state of a model with adapters fits any other made the same way: what a resumed run relies on."""
    model, inputs = adapted("gpt2")
    other = model_of(small("gpt2"), seed=5)
    add_three(other)
    other.load_state_dict(model.state_dict())
    for name in ("a", "b", "c"):
        lora.use(model, name)
        lora.use(other, name)
        assert torch.equal(model(*inputs), other(*inputs))
    twin = copy.deepcopy(model)
    lora.use(twin, "a")
    assert torch.equal(model(*inputs), other(*inputs)) and not torch.equal(model(*inputs), twin(*inputs))


def test_model_of_no_family(tmp_path):
    """What transformers cannot express has adapters too, under our names."""
    config = small("gpt2", norm="rmsnorm", placement="deep", gated=True)
    model = model_of(config)
    lora.add(model, train_also=["final_norm", "tokens"])
    stir(model)
    lora.save(model, tmp_path)
    other = model_of(config)
    lora.load(other, tmp_path)
    inputs = example(config)
    assert torch.equal(model(*inputs), other(*inputs))


def test_convert_merges(tmp_path, capsys):
    pair = Pair("gpt2", tmp_path)
    theirs = from_peft(pair, tmp_path / "a", target_modules="all-linear", modules_to_save=["ln_f"])
    base, out, adapter = (str(tmp_path / name) for name in ("base", "out", "a"))
    assert main(["convert", base, out, "--merge", adapter, "--json"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["files"]
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    close(logits(pair, plain), logits(pair, theirs))
    assert main(["convert", base, str(tmp_path / "two"), "--merge", base]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "two").exists()


def test_save_model_refuses_adapters(tmp_path):
    model, inputs = adapted("gpt2")
    with pytest.raises(ValueError, match=r"has adapters; merge them first .* or save them alone"):
        sublayer.save_model(model, tmp_path)
    lora.use(model, "b")
    expected = model(*inputs)
    lora.merge(model)
    sublayer.save_model(model, tmp_path)
    torch.testing.assert_close(sublayer.load_model(tmp_path)(*inputs), expected, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_when_made():
    model, _ = adapted("gpt2")
    for call, message in {
        lambda: lora.add(model, rank=0, name="x"): "rank is 0; it must be a whole number of at least 1",
        lambda: lora.add(model, alpha=0, name="x"): "alpha is 0; it must be a number above 0",
        lambda: lora.add(model, dropout=1.0, name="x"): "dropout is 1.0; it must be at least 0 and less than 1",
        lambda: lora.add(model, name="x", targets=["qery"]): "unknown target 'qery'; did you mean 'query'?",
        lambda: lora.add(model, name="x", train_also=["hed"]): "unknown module to train 'hed'",
        lambda: lora.add(model, name="a"): "the model has an adapter 'a' already",
        lambda: lora.add(model, name="a.b"): "'a.b' cannot name an adapter",
        lambda: lora.use(model, "aa"): "unknown adapter 'aa'; did you mean 'a'?",
        lambda: lora.unmerge(model): "no adapter is merged into the model",
        lambda: lora.merge(model_of(small("gpt2"))): "the model has no adapter; make one",
    }.items():
        with pytest.raises(ValueError, match="(?s)^" + re.escape(message)) as caught:
            call()
        assert "\n" not in str(caught.value)
    lora.merge(model, "a")
    for call in (lambda: lora.use(model, "b"), lambda: lora.merge(model), lambda: lora.add(model, name="x")):
        with pytest.raises(ValueError, match="adapter 'a' is merged into the model; unmerge it first"):
            call()


BAD = {
    "config": ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' is supported"),
    "rank": ({"r": 0}, "rank is 0; it must be a whole number of at least 1"),
    "other rank": ({"r": 4}, "has rank 3, and adapter_config.json says 4"),
    "bias": ({"bias": "all"}, "bias is 'all', which is not supported; expected 'none'"),
    "layers": ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    "blocks": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    "pissa": ({"init_lora_weights": "pissa"}, "which changes the base too"),
    "pattern": ({"alpha_pattern": {"(a+)+b": 2}}, "the pattern '(a+)+b' is too involved"),
    "no pattern": ({"rank_pattern": {"(": 2}}, "the pattern '(' is no regular expression"),
    "alphas": ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern gives '2' for 'q_proj'; expected a number above 0"),
    "alpha": ({"lora_alpha": "8"}, "alpha is '8'; it must be a number above 0"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_config(what, tmp_path):
    pair = Pair("llama", tmp_path)
    from_peft(pair, tmp_path / "a", target_modules=["q_proj"])
    path = tmp_path / "a" / "adapter_config.json"
    changes, message = BAD[what]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(pair.ours, tmp_path / "a", message)


def refused(model: Any, folder: pathlib.Path, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        lora.load(model, folder)
    assert "\n" not in str(caught.value)
    assert lora.names(model) == [] and not any(".lora." in name for name in model.state_dict())


def test_bad_files(tmp_path):
    pair = Pair("llama", tmp_path)
    refused(pair.ours, tmp_path / "base", "has no adapter_config.json")
    from_peft(pair, tmp_path / "a", target_modules=["q_proj"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    good = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, message in (
        (
            {name: torch.zeros(3, 9)},
            "has shape (3, 9), and this model asks for (3, 16); the adapter was made for another base",
        ),
        (
            {name.replace("q_proj", "qq_proj"): torch.zeros(3, 16)},
            "unknown module 'model.layers.0.self_attn.qq_proj'; did you mean",
        ),
        ({"base_model.model.score.weight": torch.zeros(2, 16)}, "unknown tensor 'score.weight'"),
        ({"base_model.model.lm_head.weight": torch.zeros(2, 16)}, "has shape (2, 16), and 'head.logits.weight'"),
        ({name.replace("lora_A.weight", "lora_embedding_A"): torch.zeros(2, 2)}, "adapts no linear layer"),
        ({name: torch.full((3, 16), float("nan"))}, "holds NaN"),
        ({"other": torch.zeros(1)}, "is no weight of an adapter"),
    ):
        save_file(good | change, path)
        refused(pair.ours, tmp_path / "a", message)
    save_file({key: value for key, value in good.items() if key != name}, path)
    refused(pair.ours, tmp_path / "a", "'model.layers.0.self_attn.q_proj' lacks its lora_A")
    path.write_bytes(b"{}")
    refused(pair.ours, tmp_path / "a", "is not a whole safetensors file")
    path.rename(path.with_suffix(".bin"))
    refused(pair.ours, tmp_path / "a", "adapter_model.bin is a pickle, which is never read")
    gpt = Pair("gpt2", tmp_path / "gpt")
    save_file(good, path)
    refused(gpt.ours, tmp_path / "a", "the adapter was made for another base")


def test_base_of_another_name_warns(tmp_path):
    pair = Pair("llama", tmp_path)
    lora.add(pair.ours)
    lora.save(pair.ours, tmp_path / "a", base="org/other")
    lora.remove(pair.ours, "default")
    with pytest.warns(UserWarning, match="made for 'org/other'; the model is"):
        lora.load(pair.ours, tmp_path / "a")


def test_load_an_adapter_with_its_base(tmp_path):
    """`sublayer.load` takes the folder of an adapter that names a base that is here."""
    sublayer.save_model(model_of(small("gpt2", vocab_size=300)), tmp_path / "base")
    words = {f"w{number}": number for number in range(300)}
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))).save(tmp_path / "base")
    model = sublayer.load_model(tmp_path / "base")
    lora.add(model)
    stir(model)
    lora.save(model, tmp_path / "a")
    lm = sublayer.load(tmp_path / "a")
    ids = torch.tensor([[5, 6, 7]])
    assert lora.names(lm.model) == ["default"] and torch.equal(lm.model(ids), model(ids))
    lora.save(model, tmp_path / "b", base=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"holds an adapter for .*gone', which is not here"):
        sublayer.load(tmp_path / "b")


def test_sharded(tmp_path):
    """Sharded training finds the base and an adapter's copy of a layer to be two things, and changes only one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        models = []
        for sharded in (False, True):
            model, inputs = adapted("gpt2")
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            for part in [*model.decoder.blocks, model] if sharded else ():
                torch.distributed.fsdp.fully_shard(part)
            optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], lr=0.5)
            for _ in range(2):
                model(*inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append({name: whole(parameter).detach() for name, parameter in model.named_parameters()})
            changed = {name for name, value in models[-1].items() if not torch.equal(value, before[name])}
            assert changed == {name for name in before if ".lora.c." in name}
        torch.testing.assert_close(models[1], models[0])
    finally:
        torch.distributed.destroy_process_group()


def test_loss_reads_the_copy():
    """A loss in chunks takes the output matrix itself, and must get that of the adapter in use."""
    model = model_of(small("bert-base", head="mlm", pooler="none", tie_embeddings=True, logits_bias="learned"))
    lora.add(model, targets=["query"], train_also=["embeddings.tokens"])
    stir(model)
    (ids,) = example(model.config)
    for name in ("default", None):
        lora.use(model, name)
        weight, bias = model.head.logits.matrix()
        out = torch.nn.functional.linear(model.head.hidden(model.features(ids)), weight, bias)
        torch.testing.assert_close(out, model(ids), rtol=1e-5, atol=1e-5)
        assert (weight is model.get_parameter("head.logits.weight")) == (name is None)
