"""Each mechanism against its definition."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.support import SCALINGS, model_of, random_ids, small

import sublayer
from sublayer import RotaryScaling
from sublayer.core.feedforward import FeedForward
from sublayer.core.kernels import fused, with_weights
from sublayer.core.layers import Dropout
from sublayer.core.layout import Layout, Packing
from sublayer.core.masks import Mask, self_mask, visible
from sublayer.core.norm import RMSNorm
from sublayer.core.positions import RelativeBias, Rotary, Sinusoidal, alibi_slopes, rotate

DTYPES = [torch.float32, torch.bfloat16]


@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 4]), st.booleans(),
    st.sampled_from([None, 1, 3]), st.booleans(),
)  # fmt: skip
def test_both_kernels_are_the_definition(batch, tokens, keys, kv_heads, causal, window, biased):
    """softmax(q·kᵀ·scale + bias)·v, written out for one head and one query at a time."""
    torch.manual_seed(batch * 100 + tokens * 10 + keys)
    keys = tokens if causal else keys
    q, k, v = (torch.randn(batch, n, h, 8) for n, h in ((tokens, 4), (keys, kv_heads), (keys, kv_heads)))
    bias = torch.randn(1, 4, tokens, keys) if biased else None
    valid = torch.rand(batch, keys) > 0.3
    allowed = visible(torch.arange(tokens), torch.arange(keys), valid, causal, window)
    mask = Mask(allowed=allowed, bias=bias)
    out = fused(q, k, v, mask, scale=0.3)
    again, weights = with_weights(q, k, v, mask, scale=0.3)
    for b in range(batch):
        for h in range(4):
            for i in range(tokens):
                seen = [
                    j for j in range(keys)
                    if valid[b, j] and (not causal or j <= i) and (window is None or abs(i - j) < window)
                ]  # fmt: skip
                expected = torch.zeros(8)
                if seen:
                    group = h * kv_heads // 4
                    scores = torch.stack([q[b, i, h] @ k[b, j, group] * 0.3 for j in seen])
                    scores = scores if bias is None else scores + bias[0, h, i, seen]
                    expected = scores.softmax(0) @ v[b, seen, group]
                torch.testing.assert_close(out[b, i, h], expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(again[b, i, h], expected, rtol=1e-4, atol=1e-5)
                total = float(weights[b, h, i].sum())
                assert total == pytest.approx(1.0 if seen else 0.0, abs=1e-5)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_in_half_precision_are_the_exact_ones_rounded(half, autocast):
    """Of few keys on a CPU nothing but the answers is rounded, whatever autocast would like."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 8, device="cpu").to(half) for n, h in ((30, 4), (40, 2), (40, 2)))
    weights = torch.randn(2, 30, 4, 8, device="cpu").to(half)
    mask = Mask(allowed=(torch.rand(2, 1, 30, 40, device="cpu") > 0.3))

    def gradients(dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", half, enabled=autocast and dtype == half):
            out = fused(*inputs, mask, scale=0.3)
        assert out.dtype == dtype
        return torch.autograd.grad(out, inputs, weights.to(dtype))

    for found, exact in zip(gradients(half), gradients(torch.float64), strict=True):
        torch.testing.assert_close(found, exact.to(half), rtol=torch.finfo(half).eps, atol=1e-6)


@given(st.floats(0.001, 0.999), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_dropout_drops_its_share_and_keeps_the_mean(p, seed, dtype):
    x = torch.rand(101, 203, device="cpu", dtype=torch.float64).add(0.5).to(dtype).requires_grad_()
    dropout = Dropout(p)
    torch.manual_seed(seed)
    out = dropout(x)
    kept = out != 0
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) < 6 * deviation + 2**-16
    ratio = (out / x)[kept].double()
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1 / (1 - p)), rtol=rounding + 2**-16 / (1 - p), atol=0)
    (back,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(back != 0, kept)
    torch.manual_seed(seed)
    assert torch.equal(dropout(x), out)
    assert not torch.equal(dropout(x), out)
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("p", [0.0, 1e-7, 1.0])
def test_dropout_at_its_ends(p):
    x = torch.ones(7, 5, requires_grad=True)
    torch.testing.assert_close(Dropout(p)(x), torch.full_like(x, float(p < 0.5)))


@pytest.mark.parametrize("dtype", [*DTYPES, "autocast"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "biased"])
def test_attention_with_dropout_is_the_definition_with_some_weights_left_out(dtype, kv_heads, kind):
    """With one-hot values the answers are the weights, which shows what was dropped: then all can be computed anew."""
    kept_in, computed_in = (torch.float32, torch.bfloat16) if dtype == "autocast" else (dtype, dtype)
    torch.manual_seed(0)
    size, p = 32, 0.3
    q, k = (torch.randn(16, size, heads, size).to(kept_in).requires_grad_() for heads in (4, kv_heads))
    v = torch.eye(size, dtype=kept_in).view(1, size, 1, size).repeat(16, 1, kv_heads, 1).requires_grad_()
    allowed = torch.rand(16, 1, size, size) > 0.3
    bias = torch.randn(1, 4, size, size, requires_grad=kind == "biased")
    mask = {"plain": Mask(), "causal": Mask(causal=True), "masked": Mask(allowed=allowed),
            "biased": Mask(allowed=allowed, bias=bias)}[kind]  # fmt: skip
    with torch.autocast(q.device.type, torch.bfloat16, enabled=dtype == "autocast"):
        out = fused(*(x.to(computed_in) for x in (q, k, v)), mask, scale=0.25, dropout=p)
    kept = (out != 0).transpose(1, 2)  # (B, H, T, S)
    given = torch.randn_like(out)
    leaves = [q, k, v, bias] if kind == "biased" else [q, k, v]
    found = torch.autograd.grad(out, leaves, given)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    query, key, value = (x.transpose(1, 2).repeat_interleave(4 // x.size(2), 1) for x in exact[:3])
    scores = query @ key.mT * 0.25 + (exact[3] if kind == "biased" else 0.0)
    seen = torch.ones_like(scores, dtype=torch.bool).tril() if kind == "causal" else allowed.expand_as(scores)
    weights = (scores if kind == "plain" else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    expected = (weights * kept / (1 - p)) @ value
    rounding = dict(rtol=0.02, atol=0.01) if computed_in == torch.bfloat16 else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), **rounding)
    for one, other in zip(found, torch.autograd.grad(expected.transpose(1, 2), exact, given.double()), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < (0.02 if computed_in == torch.bfloat16 else 1e-4)
    share = kept[weights > 1e-6].double()
    assert abs(float(share.mean()) - (1 - p)) < 6 * math.sqrt(p * (1 - p) / share.numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fully_masked_rows_give_zeros_and_finite_gradients(dtype, biased, kv_heads, dropout):
    q = torch.randn(2, 8, 4, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 8, kv_heads, 16, dtype=dtype, requires_grad=True)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :3] = False
    bias = torch.randn(1, 4, 8, 8, requires_grad=True) if biased else None
    allowed = visible(torch.arange(8), torch.arange(8), valid, causal=True)
    mask = Mask(allowed=allowed, bias=bias, blind=~allowed.any(-1, keepdim=True) if allowed.is_cuda else None)
    out = fused(q, k, k, mask, scale=0.25, dropout=dropout)
    assert torch.equal(out[0, :3], torch.zeros_like(out[0, :3]))
    out.float().square().sum().backward()
    for leaf in (q, k) if bias is None else (q, k, bias):
        assert leaf.grad.isfinite().all()
    assert torch.equal(with_weights(q, k, k, mask, scale=0.25)[0][0, :3], torch.zeros_like(out[0, :3]))


def test_plain_causal_attention_builds_no_mask_tensor():
    """The flash path: a flag, not a tensor."""
    mask = self_mask(Layout.of(torch.zeros(2, 5)), causal=True)
    assert mask == Mask(causal=True)


def test_attention_dropout_acts_in_training_only_and_keeps_the_mean():
    q = torch.randn(1, 16, 2, 8)
    v = torch.ones(1, 16, 2, 8)
    dropped = torch.stack([fused(q, q, v, Mask(), scale=1.0, dropout=0.5) for _ in range(300)])
    assert dropped.std(0).min() > 0.05
    torch.testing.assert_close(dropped.mean(0), v, rtol=0.2, atol=0.0)
    model = model_of(small("gpt2", attention_dropout=0.5))
    ids = random_ids(1, 6)
    assert torch.equal(model(ids), model(ids))
    assert not torch.equal(model.train()(ids), model(ids))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_packing_pads_and_unpads(lengths):
    packing = Packing.from_lengths(lengths)
    x = torch.arange(sum(lengths))
    padded = packing.pad(x)
    assert [row[:n].tolist() for row, n in zip(padded, lengths, strict=True)] == [
        part.tolist() for part in x.split(lengths)
    ]
    assert packing.valid.sum(1).tolist() == lengths
    assert torch.equal(packing.unpad(padded, len(x)), x)
    assert torch.equal(packing.positions(len(x)), torch.cat([torch.arange(n) for n in lengths]))


# Positions


@pytest.mark.parametrize("block", [False, True])
def test_sinusoids_are_the_papers_formula(block):
    module = Sinusoidal(64, 10, block)
    module.derive()
    for position in (0, 1, 17, 63):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            sin, cos = (i, 5 + i) if block else (2 * i, 2 * i + 1)
            assert float(module.table[position, sin]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(module.table[position, cos]) == pytest.approx(math.cos(angle), abs=1e-6)


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([False, True]))
def test_a_shifted_sinusoid_is_a_linear_function_of_it(position, shift, block):
    """PE(p + k) = M(k)·PE(p), with one rotation by k·rate in each pair, whatever p is."""
    module = Sinusoidal(64, 12, block)
    module.derive()
    rates = 10_000.0 ** -(torch.arange(0, 12, 2) / 12)
    table = module.table.view(64, 2, 6).transpose(1, 2) if block else module.table.view(64, 6, 2)
    sin, cos = table[position].unbind(-1)
    turned = torch.stack(
        (
            sin * torch.cos(shift * rates) + cos * torch.sin(shift * rates),
            cos * torch.cos(shift * rates) - sin * torch.sin(shift * rates),
        ),
        -1,
    )
    torch.testing.assert_close(turned, table[position + shift], rtol=1e-4, atol=1e-5)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 300), SCALINGS, st.sampled_from([1.0, 0.5]))
def test_rotary_scores_depend_on_the_distance_only(i, j, shift, scaling, fraction):
    if scaling is not None and scaling.kind == "dynamic":
        scaling = None  # its angles depend on the whole length as well
    config = small("llama-7b", head_dim=16, rotary_scaling=scaling, rotary_fraction=fraction, max_positions=2048)
    rotary = Rotary(config)
    rotary.derive()
    torch.manual_seed(i)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(a, b):
        turned = [rotate(x, rotary(Layout(torch.tensor([p])))) for x, p in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert score(i, j) == pytest.approx(score(i + shift, j + shift), abs=2e-3)


def test_rotary_angles_survive_a_cast_to_bfloat16():
    config = small("llama-7b")
    exact, cast = sublayer.build(config).decoder.rotary, sublayer.build(config).bfloat16().decoder.rotary
    layout = Layout(torch.tensor([0, 1000, 30_000]))
    for a, b in zip(exact(layout), cast(layout), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("length", [9, 40])
def test_rotary_scaling_equals_transformers(kind, length):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    if kind in ("default", "linear", "dynamic"):
        del parameters["original_max_position_embeddings"]
    if kind == "default":
        del parameters["factor"]
    with torch.device("cpu"):
        reference = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=64, num_attention_heads=4, max_position_embeddings=16 if kind == "dynamic" else 64,
                rope_parameters=parameters,
            )
        ).to(torch.get_default_device())  # fmt: skip
    scaling = None if kind == "default" else RotaryScaling(kind=kind, factor=4.0, original_max_positions=16)
    config = small("llama-7b", d_model=64, num_heads=4, rotary_scaling=scaling, max_positions=16)
    ours = Rotary(config)
    ours.derive()
    positions = torch.arange(length)
    cos, sin = reference(torch.zeros(1, length, 64), positions[None])
    for mine, theirs in zip(ours(Layout(positions)), (cos, sin), strict=True):
        torch.testing.assert_close(mine, theirs[0, :, :8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (6, 10)])
def test_relative_buckets_equal_transformers(causal, buckets, distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets = torch.arange(-200, 201)
    expected = T5Attention._relative_position_bucket(offsets, not causal, buckets, distance)
    ours = RelativeBias(small("t5-base", relative_buckets=buckets, relative_max_distance=distance), causal)
    assert torch.equal(ours.buckets(offsets), expected)


def test_alibi_slopes_are_the_papers():
    eight = [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(8, torch.device("cpu")).tolist() == pytest.approx(eight)
    # Twelve heads: those of eight, then every second one of sixteen.
    sixteen = [2.0 ** (-n / 2) for n in range(1, 17)]
    assert alibi_slopes(12, torch.device("cpu")).tolist() == pytest.approx(eight + sixteen[0:8:2])


# Feed-forward, norm, embeddings


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh", "silu", "sigmoid"])
def test_feed_forward_is_its_formula(activation, gated):
    module = FeedForward(small("gpt2", activation=activation, gated=gated))
    x = torch.randn(3, 32, dtype=torch.float64)
    module.double()
    formula = {
        "relu": lambda z: z.clamp(min=0),
        "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
        "gelu-tanh": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "silu": lambda z: z / (1 + torch.exp(-z)),
        "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    }[activation]
    up = x @ module.up.weight.T + module.up.bias
    hidden = formula(x @ module.gate.weight.T + module.gate.bias) * up if gated else formula(up)
    expected = hidden @ module.down.weight.T + module.down.bias
    torch.testing.assert_close(module(x), expected)


def test_rms_norm_is_computed_in_float32_under_autocast():
    norm = RMSNorm(64, 1e-6)
    x = (torch.randn(4, 64) * 100).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), exact, rtol=4e-3, atol=0)


def test_patch_positions_are_interpolated_and_the_class_token_kept():
    model = model_of(small("vit-b-16"))
    embeddings = model.encoder.embeddings
    table = embeddings.positions.weight.detach()
    wide = embeddings._grid_positions(table, 3, 5)
    assert wide.shape == (16, 32)
    assert torch.equal(wide[0], table[0])
    assert torch.equal(embeddings._grid_positions(table, 3, 3), table)
    flat = torch.ones_like(table)
    torch.testing.assert_close(embeddings._grid_positions(flat, 7, 2), torch.ones(15, 32))
    assert model(torch.rand(2, 3, 24, 40)).shape == (2, 5)


@pytest.mark.parametrize("head", ["none", "mlm", "pooler", "classifier", "token-classifier", "span"])
def test_heads_of_an_encoder(head):
    pooler = "tanh" if head in ("pooler", "classifier") else "none"
    config = small("bert-base", head=head, pooler=pooler, num_labels=3, logits_bias="learned")
    shape = {"none": (2, 6, 32), "mlm": (2, 6, 61), "pooler": (2, 32), "classifier": (2, 3)}
    shape |= {"token-classifier": (2, 6, 3), "span": (2, 6, 2)}
    model = model_of(config)
    ids = random_ids(2, 6)
    out = model(ids)
    assert out.shape == shape[head]
    left = torch.cat((random_ids(2, 3, seed=7), ids), 1)
    mask = torch.arange(9) >= 3
    padded = model(left, mask=mask.expand(2, 9))
    torch.testing.assert_close(padded if padded.dim() == 2 else padded[:, 3:], out, rtol=1e-4, atol=1e-5)
    packed = model(ids.flatten(), packing=Packing.from_lengths([6, 6]))
    torch.testing.assert_close(packed, out if out.dim() == 2 else out.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_tied_and_separate_matrices():
    def matrices(**changes):
        model = sublayer.build(small("original-base", **changes))
        weights = (model.encoder.embeddings.tokens, model.decoder.embeddings.tokens, model.head.logits)
        return model, [id(part.weight) for part in weights]

    model, ids = matrices()
    assert len(set(ids)) == 1
    assert len(set(matrices(tie_embeddings=False)[1])) == 2
    assert len(set(matrices(share_embeddings=False)[1])) == 2
    model, ids = matrices(share_embeddings=False, tie_embeddings=False, target_vocab_size=40)
    assert len(set(ids)) == 3
    assert model(random_ids(2, 4), random_ids(2, 5) % 40).shape == (2, 5, 40)
    assert (
        sublayer.build(small("original-base"), device="meta").num_parameters()
        == sublayer.build(small("original-base")).num_parameters()
    )


def test_logits_scale_and_bias():
    config = small("opus-mt-en-de")
    model = model_of(config)
    source, target = random_ids(2, 4), random_ids(2, 3)
    features = model.features(source, target)
    expected = features @ model.head.logits.weight.T + model.head.logits.bias
    torch.testing.assert_close(model(source, target), expected)
    assert "head.logits.bias" in dict(model.named_buffers())
    scaled = model_of(dataclasses.replace(config, logits_scale=0.25))
    torch.testing.assert_close(
        scaled(source, target) - scaled.head.logits.bias, (expected - model.head.logits.bias) / 4
    )


def test_initial_values_follow_each_family():
    def std(weight):
        return float(weight.detach().std())

    gpt = sublayer.build(dataclasses.replace(sublayer.preset("gpt2"), num_decoder_layers=4, vocab_size=3000), seed=0)
    block = gpt.decoder.blocks[0]
    assert std(block.attention.sublayer.query.weight) == pytest.approx(0.02, rel=0.02)
    assert std(block.attention.sublayer.output.weight) == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert std(block.feed_forward.sublayer.down.weight) == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert float(block.feed_forward.sublayer.up.bias.abs().max()) == 0.0

    t5 = sublayer.build(
        dataclasses.replace(sublayer.preset("t5-small"), num_encoder_layers=1, num_decoder_layers=1, vocab_size=3000)
    )
    block = t5.encoder.blocks[0]
    assert std(block.attention.sublayer.query.weight) == pytest.approx((512 * 64) ** -0.5, rel=0.02)
    assert std(block.attention.sublayer.key.weight) == pytest.approx(512**-0.5, rel=0.02)
    assert std(block.feed_forward.sublayer.down.weight) == pytest.approx(2048**-0.5, rel=0.02)
    assert std(t5.encoder.embeddings.tokens.weight) == pytest.approx(1.0, rel=0.02)

    bert = sublayer.build(dataclasses.replace(sublayer.preset("bert-base"), num_encoder_layers=1, vocab_size=3000))
    weight = bert.encoder.blocks[0].feed_forward.sublayer.up.weight
    assert float(weight.detach().abs().max()) <= 0.04
    # A normal cut at two deviations keeps 0.8796 of its deviation.
    assert std(weight) == pytest.approx(0.02 * 0.8796, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "encoder", "decoder", "expected"),
    [
        # The values of the DeepNorm paper: α = (2N)^¼ and β = (8N)^-¼ for one stack, the mixed form for two.
        ("encoder", 18, 0, {"encoder": (36**0.25, 144**-0.25)}),
        ("decoder", 0, 200, {"decoder": (400**0.25, 1600**-0.25)}),
        (
            "encoder-decoder", 6, 4,
            {
                "encoder": (0.81 * (6**4 * 4) ** (1 / 16), 0.87 * (6**4 * 4) ** (-1 / 16)),
                "decoder": (12**0.25, 48**-0.25),
            },
        ),
    ],
)  # fmt: skip
def test_deepnorm_constants_and_gains(shape, encoder, decoder, expected):
    config = dataclasses.replace(
        small({"encoder": "bert-base", "decoder": "gpt2", "encoder-decoder": "original-base"}[shape]),
        num_encoder_layers=encoder, num_decoder_layers=decoder, placement="deep", d_model=64, d_ff=64, num_heads=4,
        head_dim=None,
    )  # fmt: skip
    model = sublayer.build(config, seed=0)
    for side, (alpha, beta) in expected.items():
        assert config.deepnorm(side) == pytest.approx((alpha, beta))
        blocks = getattr(model, side).blocks
        assert blocks[0].attention.alpha == pytest.approx(alpha)
        xavier = math.sqrt(2 / 128)
        for name, gain in (("query", 1.0), ("key", 1.0), ("value", beta), ("output", beta)):
            weights = torch.stack([getattr(block.attention.sublayer, name).weight.detach() for block in blocks])
            assert float(weights.std()) == pytest.approx(xavier * gain, rel=0.05), name
        weights = torch.stack([block.feed_forward.sublayer.up.weight.detach() for block in blocks])
        assert float(weights.std()) == pytest.approx(xavier * beta, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "t5-base", "bert-base", "vit-b-16", "opus-mt-en-de"])
def test_half_precision_and_autocast(name, dtype):
    from tests.support import example

    config = small(name)
    model, inputs = model_of(config), example(config)
    expected = model(*inputs).float()
    with torch.autocast(model.device.type, torch.bfloat16):
        automatic = model(*inputs)
    half = model_of(config).to(dtype)
    cast = half(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    assert cast.dtype == dtype
    spread = float(expected.std())
    for out in (automatic, cast):
        assert float((out.float() - expected).abs().max()) < 0.15 * spread + 0.02
    if config.shape == "decoder":
        with torch.autocast(model.device.type, torch.bfloat16):
            cache = model.make_cache(2, 7)
            parts = torch.cat([model(part, cache=cache) for part in inputs[0].split([4, 3], 1)], 1)
        assert float((parts.float() - expected).abs().max()) < 0.15 * spread + 0.02
