"""The same numbers as torch.nn's own modules, on the same weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import sublayer
from sublayer.config import ModelConfig
from sublayer.core.attention import Attention
from sublayer.core.block import Block
from sublayer.core.layout import Layout
from sublayer.core.masks import Mask, cross_mask, self_mask
from sublayer.core.norm import BatchNorm, LayerNorm, RMSNorm

BASE = ModelConfig(
    shape="encoder-decoder", d_model=32, d_ff=64, num_heads=4, vocab_size=11, num_encoder_layers=3,
    num_decoder_layers=2, positions="none", head="none",
)  # fmt: skip
close = dict(rtol=1e-5, atol=1e-6)


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        for linear, weight, bias in zip((ours.query, ours.key, ours.value), weights, biases, strict=True):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        ours.output.load_state_dict(theirs.out_proj.state_dict())


def copy_block(ours: Block, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    copy_attention(ours.attention.sublayer, theirs.self_attn)
    ours.feed_forward.sublayer.up.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.sublayer.down.load_state_dict(theirs.linear2.state_dict())
    norms = [ours.attention.norm, ours.feed_forward.norm]
    if ours.cross is not None:
        copy_attention(ours.cross.sublayer, theirs.multihead_attn)
        norms.insert(1, ours.cross.norm)
    for norm, name in zip(norms, ("norm1", "norm2", "norm3"), strict=False):
        norm.load_state_dict(getattr(theirs, name).state_dict())


def scramble(module: nn.Module) -> None:
    """torch starts biases at 0 and norms at 1, which would hide a mistake."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)


@pytest.fixture
def padding() -> torch.Tensor:
    """True where a token is real, as everywhere in this library."""
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 5:] = False
    mask[2, 8:] = False
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_equals_multihead_attention(causal, padded, padding):
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    scramble(theirs)
    ours = Attention(BASE).eval()
    copy_attention(ours, theirs)
    x = torch.randn(3, 9, 32)
    layout = Layout.of(x, padding if padded else None)
    expected, _ = theirs(
        x, x, x,
        key_padding_mask=~padding if padded else None,
        attn_mask=torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None,
    )  # fmt: skip
    torch.testing.assert_close(ours(x, mask=self_mask(layout, causal=causal)), expected, **close)


def test_cross_attention_equals_multihead_attention(padding):
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    scramble(theirs)
    ours = Attention(BASE).eval()
    copy_attention(ours, theirs)
    x, memory = torch.randn(3, 4, 32), torch.randn(3, 9, 32)
    expected, _ = theirs(x, memory, memory, key_padding_mask=~padding)
    mask = cross_mask(Layout.of(x), Layout.of(memory, padding))
    torch.testing.assert_close(ours(x, memory, mask), expected, **close)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_equals_encoder_layer(placement, activation, padding):
    theirs = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, activation=activation, batch_first=True, norm_first=placement == "pre"
    )
    scramble(theirs)
    config = dataclasses.replace(
        BASE, shape="encoder", num_decoder_layers=0, placement=placement, activation=activation
    )
    ours = Block(config, "encoder")
    copy_block(ours, theirs)
    x = torch.randn(3, 9, 32)
    expected = theirs(x, src_key_padding_mask=~padding)
    out = ours(x, mask=self_mask(Layout.of(x, padding), causal=False))
    torch.testing.assert_close(out[padding], expected[padding], **close)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_block_equals_decoder_layer(placement, padding):
    theirs = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=placement == "pre")
    scramble(theirs)
    ours = Block(dataclasses.replace(BASE, placement=placement), "decoder")
    copy_block(ours, theirs)
    x, memory = torch.randn(3, 6, 32), torch.randn(3, 9, 32)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=causal, memory_key_padding_mask=~padding)
    memory_mask = cross_mask(Layout.of(x), Layout.of(memory, padding))
    out = ours(x, mask=Mask(causal=True), memory=memory, memory_mask=memory_mask)
    torch.testing.assert_close(out, expected, **close)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_encoder_decoder_equals_transformer(placement, padding):
    """The whole model, gradients included; torch's stacks always end in a norm, ours when asked."""
    theirs = nn.Transformer(32, 4, 3, 2, 64, dropout=0.0, batch_first=True, norm_first=placement == "pre")
    scramble(theirs)
    ours = sublayer.build(dataclasses.replace(BASE, placement=placement, final_norm=True))
    for stack, reference in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        for block, layer in zip(stack.blocks, reference.layers, strict=True):
            copy_block(block, layer)
        stack.final_norm.load_state_dict(reference.norm.state_dict())
    source, target = torch.randint(11, (3, 9)), torch.randint(11, (3, 6))
    table = ours.encoder.embeddings.tokens.weight.detach()
    expected = theirs(
        table[source], table[target], tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        src_key_padding_mask=~padding, memory_key_padding_mask=~padding,
    )  # fmt: skip
    out = ours(source, target, source_mask=padding)
    torch.testing.assert_close(out, expected, **close)
    expected.square().mean().backward()
    out.square().mean().backward()
    ours_grad = ours.encoder.blocks[0].feed_forward.sublayer.up.weight.grad
    torch.testing.assert_close(ours_grad, theirs.encoder.layers[0].linear1.weight.grad, **close)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_layer_and_rms_norm(eps):
    x = torch.randn(5, 7, 32) * 3 + 1
    for ours, theirs in (
        (LayerNorm(32, eps), nn.LayerNorm(32, eps=eps)),
        (LayerNorm(32, eps, bias=False), nn.LayerNorm(32, eps=eps, bias=False)),
        (RMSNorm(32, eps), nn.RMSNorm(32, eps=eps)),
    ):
        scramble(theirs)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x), **close)


def test_batch_norm_sees_valid_tokens_only(padding):
    """Trained on a padded batch, ours equals torch's trained on the real tokens alone; then so in evaluation."""
    theirs, ours = nn.BatchNorm1d(32, eps=1e-5), BatchNorm(32, 1e-5)
    scramble(theirs)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        ours.bias.copy_(theirs.bias)
    for _ in range(3):
        x = torch.randn(3, 9, 32) * 2 + 1
        x[~padding] = 1e6
        torch.testing.assert_close(ours(x, padding)[padding], theirs(x[padding]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, **close)
    torch.testing.assert_close(ours.running_var, theirs.running_var, **close)
    ours.eval(), theirs.eval()
    x = torch.randn(40, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
