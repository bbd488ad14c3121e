"""report.html of a training run: curves, samples, attention and recipe in one file that needs no network.

It is written anew while the run goes on, from metrics.jsonl and from what the trainer hands over. Everything that came
from data is escaped, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from .charts import Curve, Point, chart, compact, heat_map
from .progress import duration
from .report_page import SCRIPT, STYLE

MAX_PICTURES = 8
MAX_COMPARED = 400  # words; a comparison takes the square of it
REFRESH_SECONDS = 30
# Measurements that are shares of one, and read better in per cent.
SHARES = ("valid_accuracy", "exact_match", "utilisation")
NAMES = {
    "loss": "training",
    "valid_loss": "validation",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "valid_accuracy": "token accuracy",
}
# Shown as numbers at the top rather than drawn: both only grow.
NOT_DRAWN = ("step", "time", "tokens")


@dataclass(frozen=True, kw_only=True)
class Sample:
    source: str
    expected: str  # empty where nothing is the one right answer
    produced: str

    @property
    def differs(self) -> bool:
        return bool(self.expected) and self.expected.strip() != self.produced.strip()


@dataclass(frozen=True, kw_only=True)
class AttentionPicture:
    title: str
    rows: list[str]  # tokens that look
    columns: list[str]  # tokens looked at
    weights: list[list[float]]


@dataclass(kw_only=True)
class Report:
    title: str
    status: str = "running"  # "running", "finished" or "stopped: reason"
    facts: list[tuple[str, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    attention: list[AttentionPicture] = field(default_factory=list)
    recipe: str = ""
    notes: list[str] = field(default_factory=list)


Metrics = dict[str, list[Point]]


def write_report(folder: Path, report: Report) -> Path:
    """Write folder/report.html; a reader sees the page before or the page after, never half of one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a report is written into the folder of a run")
    metrics, unread = read_metrics(folder / "metrics.jsonl")
    path, temporary = folder / "report.html", folder / ".report.html.tmp"
    temporary.write_text(_page(report, metrics, unread), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def read_metrics(path: Path) -> tuple[Metrics, int]:
    """Each measurement as (step, value) in order, and the number of lines that are no measurement.

    Half a line at the end means a run that was killed, or is writing, and is not counted. A run that went on from a
    checkpoint repeats steps: the later line counts, and what the first attempt wrote after that step is dropped.
    """
    metrics: Metrics = {}
    unread = 0
    if not path.exists():
        return metrics, unread
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for index, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            unread += bool(line.strip()) and index < len(lines)
            continue
        step = record.pop("step")
        for name, value in record.items():
            points = metrics.setdefault(name, [])
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, value))
    return metrics, unread


def _record(line: str) -> dict[str, float] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    numbers = {name: _float(value) for name, value in values.items() if type(value) in (int, float)}
    step = numbers.get("step", math.nan)
    return numbers if math.isfinite(step) and step >= 0 else None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


# The page


def _page(report: Report, metrics: Metrics, unread: int) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if report.status == "running" else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in _sections(report, metrics, unread) if part)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _sections(report: Report, metrics: Metrics, unread: int) -> list[str]:
    kind = report.status.partition(":")[0]
    kind = kind if kind in ("running", "finished", "stopped") else "stopped"
    charts = _charts(metrics)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return [
        f'<header><h1>{escape(report.title)}</h1><span class="status {kind}">{escape(report.status)}</span></header>',
        _definitions("tiles", _highlights(metrics)),
        _definitions("facts", [(name, escape(value)) for name, value in report.facts]),
        "<h2>Course of training</h2>",
        f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>Nothing has been measured yet.</p>",
        _samples(report.samples),
        _attention(report.attention),
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        f"<details><summary>Recipe</summary><pre>{escape(report.recipe)}</pre></details>" if report.recipe else "",
        f"<footer>{_unread(unread)}Drawn from metrics.jsonl by sublayer.</footer>",
    ]


def _definitions(kind: str, items: Sequence[tuple[str, str]]) -> str:
    """Values are HTML already."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in items)
    return f'<dl class="{kind}">{inner}</dl>' if inner else ""


def _unread(count: int) -> str:
    if not count:
        return ""
    return "1 line could not be read. " if count == 1 else f"{count:,} lines could not be read. "


def _highlights(metrics: Metrics) -> list[tuple[str, str]]:
    """Where the run stands, and the best that each evaluation has seen."""
    steps = [points[-1][0] for points in metrics.values() if points]
    tiles = [("step", f"{max(steps):,.0f}")] if steps else []
    if time := _last(metrics, "time"):
        tiles.append(("time", duration(time)))
    if tokens := _last(metrics, "tokens"):
        tiles.append(("tokens", compact(tokens)))
    if (loss := _last(metrics, "loss")) is not None:
        tiles.append(("training loss", f"{loss:.3f}"))
    for name, title, best in (
        ("valid_loss", "validation loss", min),
        ("bleu", "BLEU", max),
        ("chrf", "chrF", max),
        ("exact_match", "exact match", max),
        ("valid_accuracy", "token accuracy", max),
    ):
        if points := Curve(name=name, points=metrics.get(name, [])).finite():
            step, value = best(points, key=lambda point: point[1])
            text = (
                f"{value:.1%}" if name in SHARES and value <= 1 else f"{value:.3f}" if best is min else f"{value:.1f}"
            )
            tiles.append((title, f"{text} <small>best, step {step:,.0f}</small>"))
    return tiles


def _last(metrics: Metrics, name: str) -> float | None:
    points = metrics.get(name)
    return points[-1][1] if points and math.isfinite(points[-1][1]) else None


def _charts(metrics: Metrics) -> list[str]:
    known: list[tuple[str, list[str], dict[str, bool]]] = [
        ("Loss", ["loss", "valid_loss"], {"wide": True}),
        ("BLEU and chrF", ["bleu", "chrf"], {"from_zero": True}),
        ("Right answers", ["exact_match", "valid_accuracy"], {"from_zero": True}),
        ("Validation perplexity", ["valid_perplexity"], {}),
        ("Learning rate", ["learning_rate"], {"from_zero": True}),
        ("Gradient norm", ["gradient_norm"], {}),
        ("Target tokens a second", ["tokens_per_second"], {"from_zero": True}),
        ("Share of the matrix rate", ["utilisation"], {"from_zero": True}),
    ]
    named = {name for _, names, _ in known for name in names}.union(NOT_DRAWN)
    known += [(_sentence(name), [name], {}) for name in sorted(metrics) if name not in named]
    charts = []
    for title, names, how in known:
        curves = [_curve(name, metrics[name]) for name in names if metrics.get(name)]
        if title == "BLEU and chrF" and len(curves) == 1:
            title = curves[0].name
        charts.append(chart(title, curves, unit="%" if _is_share(names, metrics) else "", **how))
    return [text for text in charts if text]


def _sentence(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _curve(name: str, points: list[Point]) -> Curve:
    factor = 100.0 if _is_share([name], {name: points}) else 1.0
    evaluated = name.startswith("valid_") or name in ("bleu", "chrf", "exact_match")
    scaled = [(step, value * factor) for step, value in points]
    return Curve(name=NAMES.get(name, name.replace("_", " ")), points=scaled, marked=evaluated and len(points) <= 60)


def _is_share(names: list[str], metrics: Metrics) -> bool:
    values = [value for name in names for _, value in metrics.get(name, []) if math.isfinite(value)]
    return names[0] in SHARES and all(value <= 1.0 for value in values)


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    judged = [sample for sample in samples if sample.expected]
    right = sum(not sample.differs for sample in judged)
    count = f"<small>{right} of {len(judged)} as expected</small>" if judged else ""
    return f'<h2>Samples{count}</h2><div class="samples">{"".join(map(_sample, samples))}</div>'


def _sample(sample: Sample) -> str:
    sign = "" if not sample.expected else "✗" if sample.differs else "✓"
    produced = _difference(sample.expected, sample.produced) if sample.differs else escape(sample.produced)
    expected = f'<p data-name="expected">{escape(sample.expected)}</p>' if sample.expected else ""
    return (
        f'<div class="sample{" differs" if sample.differs else ""}"><span class="mark">{sign}</span>'
        f'<p data-name="source">{escape(sample.source)}</p>{expected}<p data-name="produced">{produced}</p></div>'
    )


def _difference(expected: str, produced: str) -> str:
    """What was produced, with the words that were not expected marked; single words are compared by letter."""
    pattern = r"\s+|[^\s]+" if re.search(r"\s", expected.strip()) else r"(?s)."
    right, ours = re.findall(pattern, expected), re.findall(pattern, produced)
    if len(right) > MAX_COMPARED or len(ours) > MAX_COMPARED:
        return escape(produced)
    out = []
    for kind, _, _, start, end in difflib.SequenceMatcher(None, right, ours, autojunk=False).get_opcodes():
        text = escape("".join(ours[start:end]))
        out.append(text if kind == "equal" or not text.strip() else f"<mark>{text}</mark>")
    return "".join(out)


def _attention(pictures: Sequence[AttentionPicture]) -> str:
    shown = pictures[:MAX_PICTURES]
    maps = "".join(heat_map(one.title, one.rows, one.columns, one.weights) for one in shown)
    more = f"<small>{len(shown)} of {len(pictures)}</small>" if len(pictures) > len(shown) else ""
    return f'<h2>Attention{more}</h2><div class="pictures">{maps}</div>' if maps else ""
