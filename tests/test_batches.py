"""Stores, plans and batches: nothing is lost, nothing comes twice, and the order depends on the seed alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray
from tests.support_training import PAIRS, recipe_of, run_of, write_rows

from sublayer.data.batches import Batch, Loader, Step, ahead, collate
from sublayer.data.items import CausalRows, Items, lay, plan_epoch, split
from sublayer.data.objectives import IGNORE, sequence_to_sequence
from sublayer.data.settings import DataSettings
from sublayer.data.store import Store, Writer, cached, key_of
from sublayer.data.tasks import Context, Labels


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SUBLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
    with torch.device("cpu"):
        yield


# Stores

columns = st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=9), min_size=1, max_size=12)


@given(rows=columns, kind=st.sampled_from(["uint16", "uint32", "int32"]))
def test_a_store_gives_back_what_was_written(
    rows: list[list[int]], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    writer = Writer(folder, {"text": kind, "count": "int32"})
    for row in rows:
        writer.add({"text": row[:4], "count": [len(row)]})
        writer.add({"text": row[4:], "count": []}, continued=True)
    writer.finish({"labels": ["é"]})
    store = Store(folder)
    assert len(store) == len(rows) and store.info == {"labels": ["é"]}
    assert [store.row(n)["text"].tolist() for n in range(len(store))] == rows
    assert [store.row(n)["count"].tolist() for n in range(len(store))] == [[len(row)] for row in rows]
    assert store.lengths("text").tolist() == [len(row) for row in rows]


@pytest.mark.parametrize(("kind", "value"), [("uint16", 1 << 16), ("uint8", 256), ("uint16", -1)])
def test_a_number_that_does_not_fit_is_refused(kind: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Writer(tmp_path, {"text": kind}).add({"text": [1, value]})


def stored(folder: Path, rows: list[Any], name: str = "text", kind: str = "uint16") -> Store:
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(folder, {name: kind})
    for row in rows:
        writer.add({name: row})
    writer.finish({})
    return Store(folder)


@pytest.mark.parametrize("name", ["text.bin", "text.ends.bin", "meta.json"])
@pytest.mark.parametrize("cut", [1, 2, 8, None])
def test_a_damaged_store_is_refused_in_one_line(name: str, cut: int | None, tmp_path: Path) -> None:
    folder = stored(tmp_path / "store", [[1, 2, 3, 4], [5, 6]]).folder
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-cut]) if cut else (folder / name).unlink()
    with pytest.raises(ValueError, match=r"store.* is damaged; delete the folder") as error:
        Store(folder)
    assert "\n" not in str(error.value)


def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "text.bin").write_bytes(b"half")
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        cached(tmp_path / "data" / "key", build)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_store_is_made_once_and_whoever_is_faster_wins(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        if len(built) == 1:  # meanwhile another run makes the same
            cached(tmp_path / "key", build)
        (folder / "meta.json").write_text(str(len(built)))

    cached(tmp_path / "key", build)
    cached(tmp_path / "key", build)
    assert len(built) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_key_tells_settings_apart() -> None:
    assert key_of("a", [1]) == key_of("a", [1]) != key_of("a", [2])
    assert key_of("a", "b") != key_of("ab", "")


# Plans


class Lengths:
    """Items of which only the lengths matter."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int64)

    def order(self, seed: int | None, epoch: int) -> NDArray[np.int64]:
        return Items.order(self, seed, epoch)  # type: ignore[arg-type]

    def keys(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[order]

    def __len__(self) -> int:
        return len(self.lengths)


lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=80)


@given(
    lengths=lengths_of, tokens=st.integers(1, 100), group=st.booleans(), seed=st.none() | st.integers(0, 5),
    epoch=st.integers(0, 3),
)  # fmt: skip
def test_every_item_is_in_one_batch_of_an_epoch_and_no_batch_is_too_large(
    lengths: list[int], tokens: int, group: bool, seed: int | None, epoch: int
) -> None:
    items: Any = Lengths(lengths)
    plan = plan_epoch(items, tokens=tokens, group=group, seed=seed, epoch=epoch)
    batches = [plan.batch(n) for n in range(len(plan))]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or items.lengths[batch].sum() <= tokens
    if not group:  # as full as can be: what begins the next batch would not have fitted
        for batch, following in itertools.pairwise(batches):
            assert items.lengths[batch].sum() + items.lengths[following[0]] > tokens
    again = plan_epoch(items, tokens=tokens, group=group, seed=seed, epoch=epoch)
    assert again.order.tolist() == plan.order.tolist() and again.ends.tolist() == plan.ends.tolist()


@pytest.mark.parametrize("group", [True, False])
def test_the_order_differs_by_seed_and_epoch(group: bool) -> None:
    items: Any = Lengths([1 + n % 17 for n in range(400)])
    orders = {
        tuple(plan_epoch(items, tokens=50, group=group, seed=seed, epoch=epoch).order)
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_grouping_leaves_little_padding_and_keeps_batches_shuffled() -> None:
    random = np.random.default_rng(0)
    items: Any = Lengths(random.integers(1, 60, 3000).tolist())

    def waste(group: bool) -> float:
        plan = plan_epoch(items, tokens=600, group=group, seed=0, epoch=0)
        sizes = [items.lengths[plan.batch(n)] for n in range(len(plan))]
        return 1 - sum(map(np.sum, sizes)) / sum(len(size) * size.max() for size in sizes)

    assert waste(True) < 0.1 < 0.3 < waste(False)
    plan = plan_epoch(items, tokens=600, group=True, seed=0, epoch=0)
    means = [items.lengths[plan.batch(n)].mean() for n in range(len(plan))]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


@given(lengths=lengths_of, tokens=st.none() | st.integers(1, 60), shares=st.integers(1, 5))
def test_a_batch_is_cut_without_loss_for_any_number_of_processes(
    lengths: list[int], tokens: int | None, shares: int
) -> None:
    sizes = np.array(lengths)
    parts = split(sizes, tokens=tokens, shares=shares)
    assert list(itertools.chain.from_iterable(range(p.start, p.stop) for p in parts)) == list(range(len(lengths)))
    assert all(part.stop > part.start for part in parts)
    if tokens is not None:
        for part in parts:
            assert part.stop - part.start == 1 or sizes[part].sum() <= tokens + sizes.max()


# Batches


def contents(batch: Batch) -> list[tuple[tuple[int, ...], ...]]:
    """Source, target and labels of every example, however they are laid out, without padding."""
    names = list(batch.inputs)
    out: list[list[tuple[int, ...]]] = []
    for name in names:
        if batch.packed:
            parts = batch.inputs[name].split(batch.lengths[name].tolist())
        else:
            mask = batch.masks[name]
            rows = batch.inputs[name]
            parts = tuple(row if mask is None else row[mask[n]] for n, row in enumerate(rows))
        out.append([tuple(part.tolist()) for part in parts])
    labels = batch.labels.split(batch.lengths[names[-1]].tolist()) if batch.packed else batch.labels
    out.append([tuple(row.tolist()[: len(shown)]) for row, shown in zip(labels, out[-1], strict=True)])
    # What fills a row up is nobody's: nothing is to be learned from it.
    return [example for example in zip(*out, strict=True) if any(label != IGNORE for label in example[-1])]


def loader_of(tmp_path: Path, objective: str = "sequence-to-sequence", **changes: Any) -> Loader:
    return run_of(recipe_of(tmp_path, objective, **changes), tmp_path / "run").loader


@pytest.mark.parametrize("objective", ["sequence-to-sequence", "masked", "causal"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_processes_of_a_run_share_each_step_without_overlap(objective: str, world: int, tmp_path: Path) -> None:
    loader = loader_of(tmp_path, objective, train_batch_tokens=60, data_max_length=20)
    ranks = [dataclasses.replace(loader, rank=rank, world=world, micro_tokens=25).steps() for rank in range(world)]
    for step in itertools.islice(loader.steps(), 12):
        whole = Counter(itertools.chain.from_iterable(map(contents, step.batches)))
        mine = [next(rank) for rank in ranks]
        assert {(one.epoch, one.index, len(one.batches)) for one in mine} == {
            (step.epoch, step.index, len(mine[0].batches))
        }
        batches = [batch for one in mine for batch in one.batches]
        shared = Counter(itertools.chain.from_iterable(contents(batch) for batch in batches if batch.weight))
        assert shared == whole
        assert sum(batch.targets for batch in batches) == sum(batch.targets for batch in step.batches)


@pytest.mark.parametrize("objective", ["sequence-to-sequence", "masked", "causal", "denoising"])
def test_a_loader_begun_in_the_middle_gives_what_follows(objective: str, tmp_path: Path) -> None:
    loader = loader_of(tmp_path, objective, train_batch_tokens=40, data_max_length=16)
    steps = list(itertools.islice(loader.steps(), 30))
    assert steps[-1].epoch > 0
    for place in (1, 7, 20):
        begun = loader.steps(steps[place].epoch, steps[place].index)
        for expected, found in zip(steps[place:], begun, strict=False):
            assert (found.epoch, found.index) == (expected.epoch, expected.index)
            assert [contents(batch) for batch in found.batches] == [contents(batch) for batch in expected.batches]


def test_noise_is_new_in_each_epoch_and_the_same_in_each_evaluation(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, "masked", train_batch_tokens=1000)
    first, second = (contents(step.batches[0]) for step in itertools.islice(loader.steps(), 2))
    assert sorted(first) != sorted(second)
    once, twice = ([contents(batch) for part in loader.once() for batch in part] for _ in range(2))
    assert once == twice


@pytest.mark.parametrize("limit", [3, 7, 48])
def test_pairs_made_at_once_are_the_objectives_own(limit: int, tmp_path: Path) -> None:
    items: Any = loader_of(tmp_path, data_max_length=limit).items
    chosen = np.random.default_rng(0).permutation(len(items))[:11]
    context, rows = items.context, [items.store.row(int(n)) for n in chosen]
    start, eos = context.words.id("pad"), context.words.id("eos")
    expected = lay([
        sequence_to_sequence(row["source"], row["target"], start=start, eos=eos, max_length=limit) for row in rows
    ])  # fmt: skip
    found = items.flat(chosen, 0, 0)
    assert {name: [part.tolist() for part in found[name]] for name in found} == {
        name: [part.tolist() for part in expected[name]] for name in expected
    }


pairs = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=6)


@given(sizes=pairs, packed=st.booleans(), pad=st.integers(0, 3))
def test_what_is_collated_can_be_taken_apart(sizes: list[tuple[int, int]], packed: bool, pad: int) -> None:
    random = np.random.default_rng(0)
    examples = [
        {"source": random.integers(0, 9, s), "target": random.integers(0, 9, t), "labels": random.integers(0, 9, t)}
        for s, t in sizes
    ]
    batch = collate(lay(examples), packed=packed, pad=pad)
    assert contents(batch) == [tuple(tuple(one[name].tolist()) for name in one) for one in examples]
    assert batch.targets == sum(t for _, t in sizes)
    assert batch.tokens == {"source": sum(s for s, _ in sizes), "target": sum(t for _, t in sizes)}
    if not packed and batch.masks["source"] is not None:
        assert (batch.inputs["source"][~batch.masks["source"]] == pad).all()
    places = range(batch.labels.numel()) if batch.places is None else batch.places.tolist()
    assert batch.labels.flatten()[list(places)].tolist() == [n for one in examples for n in one["labels"]]
    assert int((batch.labels != IGNORE).sum()) == batch.targets


# Rows of causal text


def causal_rows(folder: Path, documents: list[list[int]], length: int) -> CausalRows:
    settings = DataSettings(objective="causal", max_length=length)
    return CausalRows(stored(folder, documents), Context(None, settings, Labels()))


def predictions(rows: CausalRows, items: Any, seed: int | None, epoch: int) -> Counter[tuple[int, int]]:
    out: Counter[tuple[int, int]] = Counter()
    for item in items:
        for piece in rows.examples(int(item), seed, epoch):
            assert len(piece["ids"]) == len(piece["labels"]) > 0
            out.update(zip(piece["ids"].tolist(), piece["labels"].tolist(), strict=True))
    return out


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12), length=st.integers(2, 9), seed=st.integers(0, 9))
def test_every_next_token_is_predicted_once(
    sizes: list[int], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every token has a number of its own, so that a prediction is known by it."""
    starts = np.cumsum([0, *sizes])
    documents = [list(range(a, b)) for a, b in itertools.pairwise(starts.tolist())]
    rows = causal_rows(tmp_path_factory.mktemp("rows"), documents, length)
    expected = Counter(pair for document in documents for pair in itertools.pairwise(document))
    order = rows.order(None, 0)
    assert predictions(rows, order, None, 0) == expected
    assert rows.lengths.sum() == expected.total()
    for item in order:
        assert sum(len(piece["ids"]) for piece in rows.examples(int(item), None, 0)) == rows.lengths[item] <= length
    for epoch in range(2):
        found = predictions(rows, rows.order(seed, epoch), seed, epoch)
        assert found <= expected
        assert expected.total() - found.total() < length


def test_rows_can_be_asked_for_in_any_order(tmp_path: Path) -> None:
    documents = [list(range(n * 10, n * 10 + 3 + n % 5)) for n in range(20)]
    rows = causal_rows(tmp_path, documents, 6)

    def row(item: int, epoch: int) -> list[list[int]]:
        return [piece["ids"].tolist() for piece in rows.examples(item, 1, epoch)]

    wanted = {(item, epoch): row(item, epoch) for epoch in range(2) for item in range(4)}
    assert any(wanted[item, 0] != wanted[item, 1] for item in range(4))
    for item, epoch in [(3, 1), (0, 0), (2, 1), (2, 0)]:
        assert row(item, epoch) == wanted[item, epoch]


# Made ahead


def test_steps_made_ahead_are_the_same_and_errors_come_through() -> None:
    def steps() -> Iterator[Step]:
        yield from (Step(0, n, []) for n in range(7))
        raise ValueError("row 8 is bad")

    made = ahead(steps(), 2)
    assert [next(made).index for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="row 8 is bad"):
        next(made)


def test_data_that_changed_is_tokenised_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    before = run_of(recipe, tmp_path / "run").store
    assert run_of(recipe, tmp_path / "run").store.folder == before.folder
    write_rows(tmp_path / "sequence-to-sequence.jsonl", [*PAIRS, {"source": "one more", "target": "row"}])
    after = run_of(recipe, tmp_path / "run").store
    assert len(after) == len(before) + 1 and after.folder != before.folder
