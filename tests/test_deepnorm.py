"""The claim of the DeepNorm paper: a post-norm stack of 200 layers trains with it, and not without."""

from __future__ import annotations

import pytest
import torch
from tests.support import small

import sublayer


def final_loss(placement: str, steps: int = 75) -> tuple[float, float]:
    """First and last loss on a task a single layer can do: say the token before the last one again."""
    torch.manual_seed(0)
    config = small(
        "gpt2", placement=placement, d_model=32, d_ff=64, num_heads=2, num_decoder_layers=200, vocab_size=8,
        final_norm=False, tie_embeddings=False, init="xavier",
    )  # fmt: skip
    model = sublayer.build(config, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(8, (8, 12))
        loss = torch.nn.functional.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], sum(losses[-5:]) / 5


@pytest.mark.slow
def test_two_hundred_layers_train_with_deepnorm_and_not_without():
    first, deep = final_loss("deep")
    _, post = final_loss("post")
    chance = 2.079  # ln 8
    assert deep < 0.25 * chance < first, (first, deep)
    assert post > 0.9 * chance, post
