"""The page of a run, its progress line, and the count of operations behind "41% of the matrix rate"."""

from __future__ import annotations

import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sublayer
from sublayer.models.flops import flops, flops_per_token
from sublayer.training.charts import MAX_POINTS, Curve, chart, compact, linear_axis, thin, value_axis
from sublayer.training.meter import matrix_rate
from sublayer.training.progress import Progress, duration
from sublayer.training.report import AttentionPicture, Report, Sample, read_metrics, write_report
from support import FAMILIES, example, model_of, small

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert('x')</script> & \"quoted\" </title></style>"


class Page(HTMLParser):
    """Every element with its attributes, its text, and the elements around it; an unclosed one fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[dict] = []
        self.open: list[dict] = []
        self.feed(text)
        self.close()
        assert not self.open, [element["tag"] for element in self.open]

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "around": list(self.open), **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", "around": list(self.open), **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, kind: str = "", inside: dict | None = None) -> list[dict]:
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and (not kind or kind in (element.get("class") or "").split())
            and (inside is None or any(outer is inside for outer in element["around"]))
        ]

    def charts(self) -> dict[str, dict]:
        return {self.all("b", inside=figure)[0]["text"]: figure for figure in self.all("figure", "chart")}


def write(folder: Path, lines: list, tail: str = "", **fields) -> Page:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    path = write_report(folder, Report(**({"title": "a run", "status": "finished"} | fields)))
    assert path == folder / "report.html"
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", "report.html"]
    return Page(path.read_text(encoding="utf-8"))


def places(line: dict) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]


def test_curves_are_where_the_numbers_say(tmp_path):
    """Loss falls from 4 to 0 in a straight line: so does the curve, and the evaluations lie upon it."""
    train = [{"step": step, "loss": 4 - step / 25, "tokens": step * 64} for step in range(0, 101, 10)]
    valid = [{"step": step, "valid_loss": 4 - step / 25} for step in (50, 100)]
    page = write(tmp_path, train + valid)
    figure = page.charts()["Loss"]
    first, second = page.all("polyline", inside=figure)
    assert places(first) == [(10.0 * step, 10.0 * step) for step in range(0, 101, 10)]
    assert places(second) == [(500.0, 500.0), (1000.0, 1000.0)]
    assert len(page.all("path", "dot", figure)) == 2
    upward, across = (page.all("div", axis, figure)[0] for axis in "yx")
    assert [span["text"] for span in page.all("span", inside=upward)] == ["0", "1", "2", "3", "4"]
    assert [span["style"] for span in page.all("span", inside=upward)][1] == "bottom:25.00%"
    assert [span["text"] for span in page.all("span", inside=across)] == ["0", "20", "40", "60", "80", "100"]
    assert [key["text"] for key in page.all("span", "key", figure)] == ["training", "validation"]
    assert json.loads(figure["data-series"])[1]["points"] == [[50, 2], [100, 0]]


def test_every_measurement_has_its_chart(tmp_path):
    line = {"step": 1, "time": 1.0, "tokens": 5, "loss": 2.0, "learning_rate": 1e-3, "gradient_norm": 0.8}
    line |= {"tokens_per_second": 1e5, "utilisation": 0.41, "some_new_key": 7, "name": "text", "flag": True}
    scores = {"step": 2, "bleu": 20.0, "chrf": 50.0, "exact_match": 0.5, "valid_accuracy": 0.7, "valid_perplexity": 9}
    page = write(tmp_path, [line, scores])
    assert set(page.charts()) == {
        "Loss", "BLEU and chrF", "Right answers", "Validation perplexity", "Learning rate", "Gradient norm",
        "Target tokens a second", "Share of the matrix rate", "Some new key",
    }  # fmt: skip
    shares = json.loads(page.charts()["Right answers"]["data-series"])
    assert [one["points"][0][1] for one in shares] == [50.0, 70.0]
    tiles = {div["text"] for div in page.all("div", inside=page.all("dl", "tiles")[0])}
    assert {"step2", "tokens5", "BLEU20.0 best, step 2", "exact match50.0% best, step 2"} <= tiles


def test_a_page_without_measurements(tmp_path):
    path = write_report(tmp_path, Report(title="a run"))
    page = Page(path.read_text())
    assert not page.charts() and "Nothing has been measured yet." in page.all("main")[0]["text"]
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "absent", Report(title="a run"))


def test_broken_lines_are_left_out(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        [1, 2],
        "text",
        {"loss": 5.0},
        {"step": -1, "loss": 5.0},
        {"step": 2, "loss": 2.0},
    ]
    page = write(tmp_path, lines, tail='{"step": 3, "lo')
    assert json.loads(page.charts()["Loss"]["data-series"])[0]["points"] == [[1, 3], [2, 2]]
    assert page.all("footer")[0]["text"].startswith("4 lines could not be read.")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": ' + b"9" * 5000 + b"}\n\xff\xfe\n" + b"[" * 100_000)
    assert read_metrics(tmp_path / "metrics.jsonl") == ({}, 2)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    steps = [(10, 5.0), (20, 4.0), (30, 3.0), (20, 3.5)]
    page = write(tmp_path, [{"step": step, "loss": loss} for step, loss in steps])
    assert json.loads(page.charts()["Loss"]["data-series"])[0]["points"] == [[10, 5.0], [20, 3.5]]


def test_values_that_are_not_finite_leave_a_gap(tmp_path):
    losses = [4.0, 3.0, math.nan, 2.0, 1.0, math.inf, -math.inf, 1e308, 0.5]
    page = write(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    figure = page.charts()["Loss"]
    assert [len(places(line)) for line in page.all("polyline", inside=figure)] == [2, 2]
    assert len(page.all("path", "dot", figure)) == 1  # the last, alone after a gap
    assert len(page.all("path", "gap", figure)) == 4
    assert "NaN" not in figure["data-series"] and "Infinity" not in figure["data-series"]
    page = write(tmp_path, [{"step": 1, "loss": math.nan, "time": math.nan, "valid_loss": math.nan}])
    assert "No value was finite." in page.all("figure")[0]["text"]


def test_many_lines_become_few_points_and_spikes_stay(tmp_path):
    lines = [{"step": step, "gradient_norm": 9.0 if step == 7777 else 1 + 0.1 * (step % 2)} for step in range(20_000)]
    figure = write(tmp_path, lines).charts()["Gradient norm"]
    points = json.loads(figure["data-series"])[0]["points"]
    assert len(points) <= MAX_POINTS and [7777, 9.0] in points
    assert points[0][0] == 0 and points[-1][0] == 19_999


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_keeps_ends_order_and_extremes(values, limit):
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 2) and set(kept) <= set(points) and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {min(values), max(values)} <= {value for _, value in kept}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20), st.booleans())
def test_any_numbers_can_be_drawn(values, from_zero):
    """Whatever comes, the page is well formed and each finite point lies inside the plot."""
    curve = Curve(name="x", points=[(float(step), value) for step, value in enumerate(values)], marked=True)
    page = Page(chart("x", [curve], from_zero=from_zero))
    for line in page.all("polyline"):
        assert all(-0.1 <= place <= 1000.1 for pair in places(line) for place in pair)
    assert len(page.all("path", "dot")) == len(curve.finite())


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_even_few_and_nice(low, extent):
    high = low + extent
    axis = linear_axis(low, high)
    assert axis.low <= low + 1e-6 * extent and axis.high >= high - 1e-6 * extent
    assert 2 <= len(axis.ticks) <= 8
    gaps = [after - before for before, after in zip(axis.ticks, axis.ticks[1:], strict=False)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-2)
    if abs(low) < 1e3 * extent:
        assert float(f"{gaps[0]:.6e}"[:8]) in (1.0, 2.0, 5.0)


def test_a_wide_range_is_logarithmic():
    assert value_axis([1e-3, 10.0]).ticks == [1e-3, 1e-2, 0.1, 1.0, 10.0]
    assert value_axis([1e-3, 10.0], from_zero=True).ticks[0] == 0.0
    assert not value_axis([1.0, 10.0]).logarithmic and not value_axis([0.0, 10.0]).logarithmic
    axis = value_axis([1e-3, 10.0])
    assert axis.at(0.1) == pytest.approx(0.5)


def test_numbers_for_people():
    numbers = {0.0: "0", 4.2e-4: "4.2e-4", 0.5: "0.5", 3.14159: "3.142", 1234.5: "1,234", 12_345: "12.35k", 6e7: "60M"}
    assert {number: compact(number) for number in numbers} == numbers
    assert compact(-20_000) == "-20k" and compact(math.nan) == "not finite"


def test_what_came_from_data_is_text(tmp_path):
    picture = AttentionPicture(title=HOSTILE, rows=[HOSTILE], columns=["\udc80"], weights=[[1.0]])
    page = write(
        tmp_path,
        [{"step": 1, HOSTILE: 2.0}],
        title=HOSTILE,
        status=f"stopped: {HOSTILE}",
        facts=[(HOSTILE, HOSTILE)],
        samples=[Sample(source=HOSTILE, expected=HOSTILE, produced=f"{HOSTILE}<b>")],
        attention=[picture],
        recipe=HOSTILE,
        notes=[HOSTILE],
    )
    assert len(page.all("script")) == 1 and "alert" not in page.all("script")[0]["text"]
    assert page.all("h1")[0]["text"] == page.all("pre")[0]["text"] == page.all("li")[0]["text"] == HOSTILE
    assert page.all("title")[0]["text"] == HOSTILE
    assert [p["text"] for p in page.all("p")][:2] == [HOSTILE, HOSTILE]


def test_the_page_fetches_nothing(tmp_path):
    page = write(tmp_path, [{"step": 1, "loss": 2.0}])
    assert not page.all("link") and not page.all("img")
    assert not [e for e in page.elements if {"src", "href", "srcset", "xlink:href"} & set(e)]
    assert "url(" not in page.all("style")[0]["text"] and "@import" not in page.all("style")[0]["text"]
    policy = next(e["content"] for e in page.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize(("status", "reloads"), [("running", 1), ("finished", 0), ("stopped: out of memory", 0)])
def test_only_a_running_report_reloads(tmp_path, status, reloads):
    page = write(tmp_path, [], status=status)
    assert len([e for e in page.all("meta") if e.get("http-equiv") == "refresh"]) == reloads
    assert page.all("span", "status")[0]["text"] == status


def test_wrong_samples_are_marked(tmp_path):
    samples = [
        Sample(source="a", expected="the old cat", produced="the old cat "),
        Sample(source="b", expected="the old cat", produced="the cold cat"),
        Sample(source="c", expected="2024-01-05", produced="2024-05-01"),
        Sample(source="d", expected="", produced="anything"),
    ]
    page = write(tmp_path, [], samples=samples)
    wrong = page.all("div", "differs")
    assert [page.all("p", inside=one)[0]["text"] for one in wrong] == ["b", "c"]
    assert [mark["text"] for mark in page.all("mark", inside=wrong[0])] == ["cold"]
    assert [span["text"] for span in page.all("span", "mark")] == ["✓", "✗", "✗", ""]
    assert "1 of 3 as expected" in page.all("h2")[1]["text"]


def test_attention_cells_carry_their_weights(tmp_path):
    weights = [[0.25, 0.75, 0.0], [math.nan, 1.5, -1.0]]
    picture = AttentionPicture(title="head", rows=["x", "y"], columns=["a", "b", " "], weights=weights)
    page = write(tmp_path, [], attention=[picture] * 9)
    figures = page.all("figure", "attention")
    assert len(figures) == 8
    cells = page.all("rect", inside=figures[0])
    assert [(int(c["x"]), int(c["y"])) for c in cells] == [(j, i) for i in range(2) for j in range(3)]
    assert [float(c["fill-opacity"]) for c in cells] == [0.25, 0.75, 0, 0, 1, 0]
    assert cells[1]["text"] == "x → b: 0.750"
    assert [t["text"] for t in page.all("text", inside=figures[0])] == ["x", "y", "a", "b", "␣"]
    with pytest.raises(ValueError, match=r"'head' is 1 × \[2\]; expected 1 rows of 3 weights"):
        write(tmp_path, [], attention=[AttentionPicture(title="head", rows=["x"], columns=["a"] * 3, weights=[[0, 1]])])


# Progress


def lines_of(
    total: int, every: int, steps: list[int], *, quiet: bool = False, utilisation: float | None = 0.412
) -> str:
    stream = io.StringIO()
    with Progress(total, stream=stream, every=every, quiet=quiet) as progress:
        for step in steps:
            progress.update(
                step,
                loss=3.2141,
                tokens_per_second=12345.4,
                utilisation=utilisation,
                learning_rate=4.2e-4,
                seconds_left=130.2,
            )
        progress.message("saved [bold]model[/] :smile:")
    return stream.getvalue()


def test_a_log_gets_plain_lines():
    assert lines_of(1000, 10, [120]) == (
        "step 120/1000  loss 3.214  lr 4.2e-04  12,345 tok/s  41% of matrix rate  2m10s left\n"
        "saved [bold]model[/] :smile:\n"
    )
    assert "matrix rate" not in lines_of(1000, 10, [120], utilisation=None)
    assert lines_of(1000, 10, [120], quiet=True) == ""
    text = lines_of(100, 10, [7, 10, 17, 20, 27, 99, 100])
    assert [line.split()[1] for line in text.splitlines()[:-1]] == ["7/100", "17/100", "27/100", "99/100", "100/100"]


def test_a_terminal_gets_one_live_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress(1000, stream=stream, every=10) as progress:
        progress.message("step [100]: valid loss 2.1")
        progress.update(
            120, loss=math.nan, tokens_per_second=9e4, utilisation=0.41, learning_rate=1e-3, seconds_left=math.inf
        )
    text = stream.getvalue()
    assert "step [100]: valid loss 2.1" in text and "━" in text
    assert "120/1,000 · loss nan · 90,000 tok/s · 41% of peak · ? left" in text


def test_durations():
    known = {0.2: "0s", 59.4: "59s", 59.6: "1m00s", 130: "2m10s", 3599.7: "1h00m", 3780: "1h03m", 187_200: "2d04h"}
    assert {seconds: duration(seconds) for seconds in known} == known
    assert duration(math.inf) == duration(math.nan) == "?" and duration(-3.0) == "0s"


# Operations


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_a_step_are_those_torch_counts(family):
    """Attention computed as plain products, the one kernel of which torch counts no product twice."""
    config = small(family, window=None)
    model = model_of(config).train()
    inputs = [
        x[:, :7] if config.shape == "encoder-decoder" and i == 0 else x for i, x in enumerate(example(config, 3, 11))
    ]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs).float().sum().backward()
    source = config.num_patches + 1 if config.image_input else inputs[0].size(1)
    lengths = {"source": float(source), "target": 11.0}
    counted = flops(model, config, {name: int(3 * length) for name, length in lengths.items()}, lengths)
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_operations_of_a_token_follow_the_published_formula():
    """GPT-2 small at 1024 tokens: 6·N + 12·L·H·Q·T, with N its 124M parameters less the table of positions."""
    config = sublayer.preset("gpt2")
    model = sublayer.build(config, device="meta")
    parameters = model.num_parameters() - 1024 * 768
    formula = 6 * parameters + 12 * 12 * 12 * 64 * 1024
    assert flops_per_token(config, parameters, 1024) == formula
    assert flops(model, config, {"target": 5}, {"target": 1024.0}) / 5 == pytest.approx(formula, rel=1e-3)


def test_a_window_costs_no_more_than_its_width():
    narrow, wide = (small("mistral-7b", window=window) for window in (5, None))
    costs = [
        flops(sublayer.build(config, device="meta"), config, {"target": 1}, {"target": 20.0})
        for config in (narrow, wide)
    ]
    layers, width = narrow.num_decoder_layers, narrow.num_heads * narrow.head_size
    assert costs[1] - costs[0] == 12 * layers * width * (20 - 5)


def test_measuring_the_matrix_rate_draws_no_random_number():
    before = torch.get_rng_state()
    rate = matrix_rate(torch.device("cpu"), torch.float32)
    assert 1e6 < rate < 1e16
    assert torch.equal(before, torch.get_rng_state())
