"""Dates, times, numbers, prices, units and durations, written by Babel as CLDR says each language writes them.

A drawn thing is a value and a way to write it. The wording asked of German and Chinese follows from the wording in
English, so that a text has one translation, and nothing is asked that the text does not tell: a weekday is never
computed from a date. Reach this module through `corpora`, which names the extra to install if Babel is missing.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random

from babel.dates import format_date, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import format_compact_decimal, format_currency, format_decimal, format_percent
from babel.units import format_unit

CURRENCIES = ("USD", "EUR", "GBP", "CNY", "CHF", "JPY")
UNITS = (
    "length-centimeter",
    "length-meter",
    "length-kilometer",
    "length-mile",
    "mass-gram",
    "mass-kilogram",
    "volume-liter",
    "area-square-meter",
    "speed-kilometer-per-hour",
    "temperature-celsius",
    "power-watt",
    "energy-kilowatt-hour",
    "digital-megabyte",
)
SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
# The largest count of a part below the first one: 23 hours and 59 minutes, but up to 99 of anything on its own.
LARGEST = {"second": 59, "minute": 59, "hour": 23, "day": 6, "month": 11}
# Short days are left out: English then writes the same as in full ("3 days"), German does not ("3 Tg.").
DURATIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hour", "minute"), "long"),
    (("hour", "minute"), "short"),
    (("minute", "second"), "long"),
    (("minute", "second"), "short"),
    (("day", "hour"), "long"),
    (("week", "day"), "long"),
    (("year", "month"), "long"),
    (("day", "hour", "minute"), "long"),
    (("hour", "minute", "second"), "long"),
)
# Not the short style, whose two digits do not tell the year.
DAY_STYLES = ("full", "long", "yMMMd", "yMMMEd", "yMd", "yMEd")
MONTH_STYLES = ("yMMM", "yMMMM", "yQQQ", "yQQQQ")
YEARS = range(1900, 2100)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A value in the one spelling that decides its split, and its text in a language."""

    value: str
    write: Callable[[str], str]


def draw_date(rng: Random) -> Drawn:
    if rng.random() < 0.15:
        return _draw_month(rng)
    style = rng.choice(DAY_STYLES)
    first, end = (datetime.date(year, 1, 1).toordinal() for year in (YEARS.start, YEARS.stop))
    day = datetime.date.fromordinal(rng.randrange(first, end))
    return Drawn(day.isoformat(), lambda language: _write_date(day, style, language))


def _draw_month(rng: Random) -> Drawn:
    style = rng.choice(MONTH_STYLES)
    first = datetime.date(rng.choice(YEARS), rng.randint(1, 12), 1)
    value = f"{first.year}-Q{(first.month + 2) // 3}" if "Q" in style else f"{first.year}-{first.month:02}"
    return Drawn(value, lambda language: format_skeleton(style, first, locale=language))


def _write_date(day: datetime.date, style: str, language: str) -> str:
    if style in ("long", "full"):
        return format_date(day, style, locale=language)
    return format_skeleton(style, day, locale=language)


def draw_time(rng: Random) -> Drawn:
    """English by the clock of twelve or of twenty-four hours; German and Chinese by that of twenty-four."""
    style = rng.choice(("short", "medium", "Hm", "Hms"))
    seconds = rng.randrange(60) if style in ("medium", "Hms") else 0
    time = datetime.time(rng.randrange(24), rng.randrange(60), seconds)
    return Drawn(time.isoformat(), lambda language: _write_time(time, style, language))


def _write_time(time: datetime.time, style: str, language: str) -> str:
    if style in ("short", "medium"):
        return format_time(time, style, locale=language)
    return format_skeleton(style, time, locale=language)


def draw_number(rng: Random) -> Drawn:
    style = rng.choice(("whole", "decimal", "percent", "compact"))
    if style == "compact":
        return _draw_compact(rng)
    if style == "percent":
        value = _decimal(rng, (1, 2, 2, 2, 3), rng.choice((0, 1, 1, 2, 2)))
    else:
        value = _decimal(rng, (1, 2, 3, 3, 4, 4, 5, 5, 6, 6), 0 if style == "whole" else rng.choice((1, 2)))
    signed = -value if rng.random() < 0.1 else value
    if style == "percent":
        share = signed.scaleb(-2)
        return Drawn(
            canonical(value), lambda language: format_percent(share, locale=language, decimal_quantization=False)
        )
    return Drawn(canonical(value), lambda language: format_decimal(signed, locale=language))


def _draw_compact(rng: Random) -> Drawn:
    """1.2 million: German changes the words, Chinese also the scale, since it counts in ten thousands (120万)."""
    tenths = Decimal(rng.randrange(10, 10 ** rng.choice((2, 3, 4))))  # 1.0 to 999.9
    value = tenths.scaleb(rng.choice((5, 8)))
    return Drawn(canonical(value), lambda language: _write_compact(value, language))


def _write_compact(value: Decimal, language: str) -> str:
    length = "short" if language == "zh" else "long"  # in Chinese they are the same; Babel holds the short one
    return format_compact_decimal(value, format_type=length, locale=language, fraction_digits=4)  # type: ignore[arg-type]


def draw_price(rng: Random) -> Drawn:
    currency = rng.choice(CURRENCIES)
    value = _decimal(rng, (1, 2, 2, 3, 3, 4, 5), 0 if currency == "JPY" else 2)
    # One of a currency has endings of its own, too rare to be learnt: it is written with the sign.
    style = "name" if rng.random() < 0.4 and value != 1 else "standard"
    return Drawn(
        canonical(value),
        lambda language: format_currency(value, currency, locale=language, format_type=style),  # type: ignore[arg-type]
    )


def draw_unit(rng: Random) -> Drawn:
    unit, length = rng.choice(UNITS), rng.choice(("long", "short"))
    value = _decimal(rng, (1, 2, 2, 3, 3, 4), rng.choice((0, 0, 1, 1, 2)))
    if rng.random() < 0.03:
        value = Decimal(1)  # often enough that the singular is learnt
    if value == 1:
        length = "long"  # German abbreviates no single meter, but a single kilometer
    signed = -value if unit == "temperature-celsius" and rng.random() < 0.3 else value
    return Drawn(canonical(value), lambda language: write_unit(signed, unit, length, language))


def write_unit(value: Decimal | int, unit: str, length: str, language: str) -> str:
    """CLDR lets a missing long form be the short one; Babel does not follow that, and gives the name of the unit."""
    text = format_unit(value, unit, length=length, locale=language)  # type: ignore[arg-type]
    return text if unit not in text else format_unit(value, unit, length="short", locale=language)


def draw_duration(rng: Random) -> Drawn:
    if rng.random() < 0.25:
        return _draw_count(rng)
    units, length = rng.choice(DURATIONS)
    counts = [rng.randint(1, 99 if index == 0 else LARGEST[unit]) for index, unit in enumerate(units)]
    return Drawn(_length(units, counts), lambda language: _write_duration(units, counts, length, language))


def _length(units: Sequence[str], counts: Sequence[int]) -> str:
    if "month" in units:
        return f"{counts[0] * 12 + counts[1]} months"
    return f"{sum(SECONDS[unit] * count for unit, count in zip(units, counts, strict=True))}s"


def _write_duration(units: Sequence[str], counts: Sequence[int], length: str, language: str) -> str:
    parts = [write_unit(count, f"duration-{unit}", length, language) for unit, count in zip(units, counts, strict=True)]
    style = "unit-short" if length == "short" or language == "zh" else "standard"
    return format_list(parts, style, locale=language)  # type: ignore[arg-type]


def _draw_count(rng: Random) -> Drawn:
    """One count of one unit: alone, from now, or ago, which in German changes its ending (3 Tage, vor 3 Tagen)."""
    unit, count = rng.choice(tuple(SECONDS)), rng.randint(1, 99)
    delta = datetime.timedelta(seconds=SECONDS[unit] * count) * rng.choice((-1, 1, 0))
    if not delta:
        return Drawn(
            _length((unit,), (count,)), lambda language: write_unit(count, f"duration-{unit}", "long", language)
        )

    def write(language: str) -> str:
        return format_timedelta(delta, unit, threshold=float("inf"), add_direction=True, locale=language)  # type: ignore[arg-type]

    return Drawn(_length((unit,), (count,)), write)


def _decimal(rng: Random, digits: Sequence[int], places: int) -> Decimal:
    """A number with so many digits before the point, chosen from `digits`, and so many after it."""
    length = rng.choice(digits)
    low = 0 if length == 1 and places else 10 ** (length - 1)
    return Decimal(rng.randrange(low * 10**places, 10 ** (length + places))).scaleb(-places)


def canonical(value: Decimal) -> str:
    return f"{abs(value).normalize():f}"


DRAW: dict[str, Callable[[Random], Drawn]] = {
    "date": draw_date,
    "time": draw_time,
    "number": draw_number,
    "price": draw_price,
    "unit": draw_unit,
    "duration": draw_duration,
}
