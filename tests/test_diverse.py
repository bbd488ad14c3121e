"""Groups of beams that keep off each other's words: equal to the definition, written down without batches or caches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import sublayer
from sublayer.generation.generate import make_options, search
from support import random_ids, small

EOS = 2


@pytest.fixture(scope="module", params=["gpt2", "t5-small"])
def model(request):
    config = small(request.param)
    torch.manual_seed(1)
    model = sublayer.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


@torch.inference_mode()
def definition(
    model: Any, ids: torch.Tensor, *, groups: int, width: int, penalty: float, length: int, early: bool
) -> list[tuple[float, list[int]]]:
    """Vijayakumar et al. 2018, algorithm 1, with a list of (score, tokens) for each group; no cache, no tensors."""

    def logs(tokens: list[int]) -> list[float]:
        new = torch.tensor([tokens], dtype=torch.long)
        if model.config.shape == "decoder":
            out = model(torch.cat([ids, new], 1))
        else:
            out = model(ids, torch.cat([torch.tensor([[model.config.start_id]]), new], 1))
        return out[0, -1].log_softmax(-1).tolist()

    running: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(groups)]
    answers: list[list[tuple[float, list[int]]]] = [[] for _ in range(groups)]
    going = [True] * groups
    for count in range(1, length + 1):
        said: list[int] = []
        for group in range(groups):
            if not going[group]:
                continue
            candidates = [
                (score + value - penalty * said.count(token), [*tokens, token])
                for score, tokens in running[group]
                for token, value in enumerate(logs(tokens))
            ]
            candidates = sorted(candidates, key=lambda one: -one[0])[: 2 * width]
            over = count == length
            for score, tokens in candidates[:width]:
                if tokens[-1] == EOS or over:
                    answers[group].append((score / count, tokens))
            answers[group] = sorted(answers[group], key=lambda one: -one[0])[:width]
            running[group] = [one for one in candidates if one[1][-1] != EOS][:width]
            said += [tokens[-1] for _, tokens in running[group]]
            full = len(answers[group]) == width
            if full and (early or running[group][0][0] / count <= answers[group][-1][0]):
                going[group] = False
    return sorted(itertools.chain(*answers), key=lambda one: -one[0])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("groups", "width", "penalty"), [(2, 1, 0.7), (3, 2, 1.5), (2, 2, 0.2)])
def test_groups_equal_the_definition(model, groups, width, penalty, early):
    ids = random_ids(3, 5, seed=groups)
    options = make_options(
        max_new_tokens=6, num_beams=groups * width, beam_groups=groups, diversity_penalty=penalty,
        early_stopping=early, eos_id=EOS, pad_id=0,
    )  # fmt: skip
    together = search(model, ids, options)
    for row in range(3):
        expected = definition(
            model, ids[row : row + 1], groups=groups, width=width, penalty=penalty, length=6, early=early
        )
        for place, (score, tokens) in enumerate(expected):
            assert float(together.scores[row, place]) == pytest.approx(score, abs=1e-4)
            assert together.tokens[row, place, : len(tokens)].tolist() == tokens


def test_groups_without_a_penalty_say_the_same(model):
    """Each is then a search of its own, as if the others were not there."""
    ids = random_ids(2, 5)
    apart = search(model, ids, make_options(max_new_tokens=6, num_beams=2, eos_id=EOS, pad_id=0))
    both = search(model, ids, make_options(max_new_tokens=6, num_beams=4, beam_groups=2, eos_id=EOS, pad_id=0))
    torch.testing.assert_close(both.scores[:, ::2], apart.scores)
    torch.testing.assert_close(both.scores[:, 1::2], apart.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_beams=4, beam_groups=3), "4 beams do not make 3 groups of the same size"),
        (dict(num_beams=4, diversity_penalty=0.5), "it needs beam_groups"),
        (dict(num_beams=4, beam_groups=2, diversity_penalty=-1.0), "diversity_penalty is -1.0; it must be 0 or more"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        make_options(max_new_tokens=2, **options)
