"""Line charts and heat maps as HTML with inline SVG, without a plotting library.

A plot stretches with the page while its text does not: the SVG holds only curves and grid lines, in a square of
1000 × 1000 that is drawn to any shape, and the labels are HTML beside it, placed in per cent. Colours are classes, so
that one style sheet serves light, dark and paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

MAX_POINTS = 500  # a curve
MAX_GAPS = 100  # marks for values that are not finite
MAX_TOKENS = 40  # a side of a heat map
WIDE = 50.0  # largest over smallest from which a curve is easier to read on a logarithmic axis
LARGEST, SMALLEST = 1e300, 1e-300
CELL = 23  # pixels of a heat map's cell

Point = tuple[float, float]  # step, value


@dataclass(kw_only=True)
class Curve:
    name: str
    points: list[Point]
    marked: bool = False  # a dot at every point: a few evaluations rather than a stream of steps

    def finite(self) -> list[Point]:
        """What can be drawn; the largest floats overflow as soon as an axis is laid around them."""
        return [point for point in self.points if abs(point[1]) < LARGEST]

    def gaps(self) -> list[Point]:
        return [point for point in self.points if not abs(point[1]) < LARGEST]


@dataclass(kw_only=True)
class Axis:
    """A range with ticks at nice numbers; `at` gives the place of a value between 0 and 1."""

    low: float
    high: float
    ticks: list[float] = field(default_factory=list)
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def linear_axis(low: float, high: float, count: int = 5) -> Axis:
    """Ticks at 1, 2 or 5 times a power of ten; the range grows to the ticks around it."""
    size = max(abs(low), abs(high))
    if size < SMALLEST:
        low, high = 0.0, 1.0
    elif high - low < 1e-9 * size:  # a constant, but for rounding
        low, high = min(low, 0.0), max(high, 0.0)
    spacing = (high - low) / count
    power = 10.0 ** math.floor(math.log10(spacing))
    spacing = next(nice * power for nice in (1.0, 2.0, 5.0, 10.0) if nice * power >= spacing * 0.999)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    ticks = [float(f"{index * spacing:.12g}") for index in range(first, last + 1)]
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def step_axis(last: float) -> Axis:
    """From 0 to the last step exactly: the curve fills the plot while it grows."""
    ticks = linear_axis(0.0, last, 6).ticks
    return Axis(low=0.0, high=last or 1.0, ticks=[tick for tick in ticks if tick <= (last or 1.0)])


def logarithmic_axis(low: float, high: float) -> Axis:
    """Ticks at powers of ten, at 2 and 5 times them where there are few, and not at all powers where there are many."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    steps = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0,)
    ticks = [float(f"{step}e{power}") for power in range(first, last, every) for step in steps] + [float(f"1e{last}")]
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, logarithmic=True)


def value_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    low, high = min(values), max(values)
    if not from_zero and low > SMALLEST and high / low > WIDE:
        return logarithmic_axis(low, high)
    return linear_axis(min(low, 0.0) if from_zero else low, high)


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the first, the last, and the lowest and highest of each stretch, so that spikes stay."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    stretches = (limit - 2) // 2
    kept = [points[0]]
    for index in range(stretches):
        part = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def compact(value: float) -> str:
    """A number for a label: four digits, thousands marked, powers of ten only for what is very large or small."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    if size >= 1e4:
        unit, name = next(
            (unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if size >= unit
        )
        return f"{value / unit:.4g}{name}" if value / unit < 1000 else f"{value / unit:,.0f}{name}"
    return f"{value:,.0f}" if value == int(value) or size >= 1000 else f"{value:.4g}"


def chart(title: str, curves: Sequence[Curve], *, unit: str = "", from_zero: bool = False, wide: bool = False) -> str:
    """A figure with one vertical axis for all its curves; empty text where there is no point at all."""
    drawn = [(index, curve, thin(curve.finite())) for index, curve in enumerate(curves) if curve.finite()]
    legend = "".join(f'<span class="key k{index}">{escape(curve.name)}</span>' for index, curve, _ in drawn)
    lost = '<span class="key lost">not finite</span>' if any(curve.gaps() for curve in curves) else ""
    caption = f"<b>{escape(title)}</b>{legend if len(curves) > 1 else ''}{lost}"
    if not drawn:
        return f"<figure><figcaption>{caption}</figcaption>No value was finite.</figure>" if lost else ""
    across = step_axis(max(step for curve in curves for step, _ in curve.points))
    upward = value_axis([value for _, _, points in drawn for _, value in points], from_zero=from_zero)
    scale = '<span class="scale">log scale</span>' if upward.logarithmic else ""
    lines = "".join(_line(index, curve, across, upward, unit) for index, curve, _ in drawn)
    grid = "".join(f'<path class="grid" d="M0 {_y(upward, tick)}H1000"/>' for tick in upward.ticks)
    data = [{"name": curve.name, "points": points} for _, curve, points in drawn]
    ends = [f"{curve.name} from {compact(points[0][1])} to {compact(points[-1][1])}" for _, curve, points in drawn]
    return (
        f'<figure class="chart{" wide" if wide else ""}" data-high="{across.high}" data-unit="{escape(unit)}" '
        f'data-series="{escape(json.dumps(data, separators=(",", ":")))}"><figcaption>{caption}{scale}</figcaption>'
        f'<div class="plot"><div class="y">{_labels(upward, "bottom", unit)}</div><div class="area">'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}: {escape("; ".join(ends))}">{grid}{lines}</svg>'
        f'</div><div class="x">{_labels(across, "left")}</div></div></figure>'
    )


def _labels(axis: Axis, edge: str, unit: str = "") -> str:
    whole = edge == "left" and axis.high < 1e5  # steps are counted in full while there is room
    texts = [f"{tick:,.0f}" if whole and tick == int(tick) else compact(tick) for tick in axis.ticks]
    places = [f"{edge}:{100 * axis.at(tick):.2f}%" for tick in axis.ticks]
    return "".join(
        f'<span style="{place}">{text}{escape(unit)}</span>' for place, text in zip(places, texts, strict=True)
    )


def _line(index: int, curve: Curve, across: Axis, upward: Axis, unit: str) -> str:
    """A curve broken where a value is not finite; there it leaves a mark on the upper edge instead."""
    points = sorted([*thin(curve.finite()), *curve.gaps()], key=lambda point: point[0])
    out = []
    for finite, run in groupby(points, key=lambda point: abs(point[1]) < LARGEST):
        stretch = list(run)
        if finite and len(stretch) > 1:
            places = " ".join(f"{_x(across, step)},{_y(upward, value)}" for step, value in stretch)
            out.append(f'<polyline class="line k{index}" points="{places}"/>')
        if finite and (curve.marked or len(stretch) == 1):
            out += [
                _dot(f"dot k{index}", across, step, _y(upward, value), compact(value) + unit) for step, value in stretch
            ]
    out += [_dot("gap", across, step, "0", f"{curve.name} was {value}") for step, value in curve.gaps()[:MAX_GAPS]]
    return "".join(out)


def _dot(kind: str, across: Axis, step: float, height: str, text: str) -> str:
    """A stroke of no length with round ends stays round however the plot is stretched."""
    label = f"step {step:,.0f}: {text}"
    return f'<path class="{kind}" d="M{_x(across, step)} {height}h0"><title>{escape(label)}</title></path>'


def _x(axis: Axis, step: float) -> str:
    return f"{1000 * axis.at(step):.1f}"


def _y(axis: Axis, value: float) -> str:
    return f"{1000 * (1 - axis.at(value)):.1f}"


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], weights: Sequence[Sequence[float]]) -> str:
    """One cell for each weight between 0 and 1, its token on the left and the token it looks at above."""
    if len(weights) != len(rows) or any(len(line) != len(columns) for line in weights):
        shape = f"{len(weights)} × {sorted({len(line) for line in weights})}"
        raise ValueError(f"attention {title!r} is {shape}; expected {len(rows)} rows of {len(columns)} weights")
    cut = len(rows) > MAX_TOKENS or len(columns) > MAX_TOKENS
    rows, columns = rows[:MAX_TOKENS], columns[:MAX_TOKENS]
    # Room for the labels: letters are some 7 pixels wide, those above stand at 60°.
    left = 10 + 7 * max((len(_token(row)) for row in rows), default=0)
    top = 10 + 6 * max((len(_token(column)) for column in columns), default=0)
    width, height = left + CELL * len(columns) + top // 2, top + CELL * len(rows) + 2
    labels = [
        f'<text x="{left - 6}" y="{top + CELL * (i + 0.65):g}" text-anchor="end">{escape(_token(row))}</text>'
        for i, row in enumerate(rows)
    ]
    labels += [
        f'<text transform="translate({left + CELL * j + 14} {top - 5}) rotate(-60)">{escape(_token(column))}</text>'
        for j, column in enumerate(columns)
    ]
    cells = [
        _cell(i, j, f"{row} → {column}", weights[i][j])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
    frame = f'<path class="frame" d="M0 0H{len(columns)}V{len(rows)}H0z"/>'
    more = f'<span class="scale">first {MAX_TOKENS} tokens</span>' if cut else ""
    return (
        f'<figure class="attention"><figcaption><b>{escape(title)}</b>{more}</figcaption><div class="scroll">'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(labels)}'
        f'<g transform="translate({left} {top}) scale({CELL})">{"".join(cells)}{frame}</g></svg></div></figure>'
    )


def _cell(row: int, column: int, tokens: str, weight: float) -> str:
    strength = min(max(weight, 0.0), 1.0) if math.isfinite(weight) else 0.0
    title = f"<title>{escape(tokens)}: {weight:.3f}</title>"
    return f'<rect x="{column}" y="{row}" fill-opacity="{strength:.3g}">{title}</rect>'


def _token(text: str) -> str:
    """A token as a label: short, and visible where it is only space."""
    text = text.replace("\n", "↵").replace(" ", "␣")
    return text if len(text) <= 12 else text[:11] + "…"
