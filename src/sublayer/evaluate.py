"""How good a model is on data it has not learned from: loss, accuracy, and, for texts it writes, BLEU and chrF."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .core.kernels import with_weights
from .data import Tokenizer
from .data.batches import Loader
from .data.tasks import Context
from .generation import generate
from .models import EncoderDecoder, Model
from .training.distributed import World
from .training.recipe import Recipe
from .training.report import AttentionPicture, Sample
from .training.step import BatchLoss


class Evaluator:
    """Called with the model by the trainer; keeps the last samples, for the report."""

    def __init__(
        self, loader: Loader, recipe: Recipe, context: Context, world: World, tokenizer: Tokenizer | None
    ) -> None:
        self.loader, self.recipe, self.context, self.world, self.tokenizer = loader, recipe, context, world, tokenizer
        self.samples: list[Sample] = []
        self.attention: list[AttentionPicture] = []

    @torch.no_grad()
    def __call__(self, model: Model, step: int) -> dict[str, float]:
        settings, world = self.recipe.train, self.world
        loss_of = BatchLoss(model, chunk=settings.loss_chunk)
        total, right, targets = 0.0, 0, 0
        # One context for all batches: it keeps the weights it has rounded.
        with torch.autocast(world.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            for batch in chain.from_iterable(self.loader.once()):
                loss, hits = loss_of(batch.to(world.device), count=True)
                total += float(loss) * batch.weight
                right += int(hits) if batch.weight else 0
                targets += batch.targets
        total, hits_in_all, count = world.sum(total, right, targets)
        mean = total / max(count, 1.0)
        metrics = {"valid_loss": mean, "valid_perplexity": math.exp(min(mean, 700.0))}
        metrics["valid_accuracy"] = hits_in_all / max(count, 1.0)
        writes = self.recipe.data.objective == "sequence-to-sequence" and settings.eval_samples > 0
        if writes and not world.sharded:
            metrics |= self._written(model)
        return metrics

    def _written(self, model: Model) -> dict[str, float]:
        """Translate the first of the validation pairs, and compare."""
        assert self.tokenizer is not None
        rows = [
            self.loader.items.store.row(n) for n in range(min(self.recipe.train.eval_samples, len(self.loader.items)))
        ]
        limit = self.recipe.data.max_length
        sources = [row["source"].tolist()[:limit] for row in rows]
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.recipe.train.dtype == "bfloat16"):
            produced = [self.tokenizer.decode(ids) for ids in write(model, sources, limit)]
        expected = [self.tokenizer.decode(row["target"].tolist()) for row in rows]
        shown = [self._source(row["source"].tolist()) for row in rows]
        self.samples = [
            Sample(source=s, expected=e, produced=p) for s, e, p in zip(shown, expected, produced, strict=True)
        ][:24]
        return compare(produced, expected)

    def _source(self, ids: list[int]) -> str:
        """With the language it asks for, and without the ends that the tokenizer put around it."""
        assert self.tokenizer is not None
        frame = {*self.context.words.frame[0], *self.context.words.frame[1]}
        return self.tokenizer.decode([token for token in ids if token not in frame], skip_special=False)

    @torch.no_grad()
    def picture(self, model: Model, count: int = 4) -> None:
        """Cross-attention of the last layer, mean over the heads, for a few of the samples."""
        if not isinstance(model, EncoderDecoder) or self.recipe.data.objective != "sequence-to-sequence":
            return
        assert self.tokenizer is not None
        for number in range(min(count, len(self.loader.items))):
            source = self.loader.items.store.row(number)["source"].tolist()[: self.recipe.data.max_length]
            target = write(model, [source], self.recipe.data.max_length)[0]
            if target:
                weights = cross_attention(model, source, target)
                rows, columns = ([_show(self.tokenizer, token) for token in ids] for ids in (target, source))
                self.attention.append(
                    AttentionPicture(title=self._source(source), rows=rows, columns=columns, weights=weights)
                )


def write(model: Model, sources: Sequence[Sequence[int]], limit: int, batch: int = 64) -> list[list[int]]:
    """What the model answers to each source, greedily; sources of about one length together."""
    answers: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    ends = model.config.eos_id if isinstance(model.config.eos_id, tuple) else (model.config.eos_id,)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        longest = max(len(sources[n]) for n in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros(len(part), longest, dtype=torch.bool)
        for row, n in enumerate(part):
            ids[row, : len(sources[n])] = torch.tensor(sources[n])
            mask[row, : len(sources[n])] = True
        new = generate(model, ids.to(model.device), mask=mask.to(model.device), max_new_tokens=limit)
        for n, row_ids in zip(part, new.tolist(), strict=True):
            answers[n] = row_ids[: next((k for k, token in enumerate(row_ids) if token in ends), len(row_ids))]
    return answers


def compare(produced: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """BLEU and chrF as sacrebleu counts them, from 0 to 100, and the share of texts that are exactly right."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    pairs = list(zip(produced, expected, strict=True))
    return {
        "bleu": BLEU(effective_order=False).corpus_score(list(produced), [list(expected)]).score,
        "chrf": CHRF().corpus_score(list(produced), [list(expected)]).score,
        "exact_match": sum(one == other for one, other in pairs) / max(len(pairs), 1),
    }


def cross_attention(model: EncoderDecoder, source: list[int], target: list[int]) -> list[list[float]]:
    """(target, source): how much the last layer looked at each source token when it wrote each target token."""
    attention: Any = model.decoder.blocks[-1].cross.sublayer  # type: ignore[union-attr]
    kept: list[Tensor] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        out, weights = with_weights(*args, **kwargs)
        kept.append(weights)
        return out

    plain, attention.kernel = attention.kernel, kernel
    try:
        ids = torch.tensor([source], device=model.device)
        model.features(ids, torch.tensor([[model.config.start_id or 0, *target[:-1]]], device=model.device))
    finally:
        attention.kernel = plain
    return kept[0][0].mean(0).tolist()


def _show(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special=False) or "·"
