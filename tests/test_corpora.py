"""The built-in corpora: exact, unambiguous, the same for a seed, and split by value.

Translations are checked from the English alone: the text is read back by `strptime` and Babel's own parser, and the
value found in it is written by Babel's public functions in the other language. So nothing may be asked that the English
does not tell.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import pathlib
import re
import sys
from decimal import Decimal

import numpy
import pytest
from babel.dates import format_date, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    get_currency_name,
    parse_decimal,
)
from babel.units import format_unit

from sublayer.data.corpora import (
    KINDS,
    SPLITS,
    cldr_pairs,
    digits,
    labelled_text,
    questions,
    split_of,
    stdlib_files,
    tagged_text,
)
from sublayer.data.corpora_cldr import CURRENCIES, UNITS

COUNT = 6000
DATES = {  # what English wrote -> how the others write it
    "%A, %B %d, %Y": lambda day, language: format_date(day, "full", locale=language),
    "%B %d, %Y": lambda day, language: format_date(day, "long", locale=language),
    "%b %d, %Y": lambda day, language: format_skeleton("yMMMd", day, locale=language),
    "%a, %b %d, %Y": lambda day, language: format_skeleton("yMMMEd", day, locale=language),
    "%m/%d/%Y": lambda day, language: format_skeleton("yMd", day, locale=language),
    "%a, %m/%d/%Y": lambda day, language: format_skeleton("yMEd", day, locale=language),
}
TIMES = {"%I:%M %p": "short", "%I:%M:%S %p": "medium", "%H:%M": "short", "%H:%M:%S": "medium"}
SCALES = {"million": Decimal(10) ** 6, "billion": Decimal(10) ** 9}
NAMES = {get_currency_name(code, count=2, locale="en"): code for code in CURRENCIES}
SECONDS = {"second": 1, "sec": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "day": 86400, "week": 604800}
FULL_NAMES = {"sec": "second", "min": "minute", "hr": "hour"}


def plain(text: str) -> str:
    return re.sub("[\u00a0\u202f]", " ", text)


def value_of(number: Decimal) -> str:
    """The shortest way to write a number without sign or exponent."""
    text = f"{abs(number):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def parsed(text: str, patterns: dict) -> tuple[str, datetime.datetime]:
    for pattern in patterns:
        try:
            return pattern, datetime.datetime.strptime(text, pattern)
        except ValueError:
            continue
    raise AssertionError(f"{text!r} is in none of the forms {list(patterns)}")


def read_date(text: str, language: str) -> tuple[str, str]:
    if found := re.fullmatch(r"(?:Q(\d)|(\d)(?:st|nd|rd|th) quarter) (\d{4})", text):
        quarter, year = int(found[1] or found[2]), int(found[3])
        skeleton = "yQQQ" if found[1] else "yQQQQ"
        return f"{year}-Q{quarter}", format_skeleton(skeleton, datetime.date(year, 3 * quarter, 1), locale=language)
    if found := re.fullmatch(r"[A-Z][a-z]+ \d{4}", text):
        pattern, moment = parsed(text, {"%b %Y": 0, "%B %Y": 0})
        skeleton = "yMMM" if pattern == "%b %Y" else "yMMMM"
        return f"{moment:%Y-%m}", format_skeleton(skeleton, moment.date(), locale=language)
    pattern, moment = parsed(text, DATES)
    return moment.date().isoformat(), DATES[pattern](moment.date(), language)


def read_time(text: str, language: str) -> tuple[str, str]:
    pattern, moment = parsed(text, TIMES)
    return moment.time().isoformat(), format_time(moment.time(), TIMES[pattern], locale=language)


def read_number(text: str, language: str) -> tuple[str, str]:
    number, _, scale = text.partition(" ")
    if scale:
        value = parse_decimal(number, locale="en") * SCALES[scale]
        length = "short" if language == "zh" else "long"
        return value_of(value), format_compact_decimal(value, format_type=length, locale=language, fraction_digits=9)
    if number.endswith("%"):
        value = parse_decimal(number[:-1], locale="en")
        return value_of(value), format_percent(value / 100, locale=language, decimal_quantization=False)
    value = parse_decimal(number, locale="en")
    return value_of(value), format_decimal(value, locale=language)


def read_price(text: str, language: str) -> tuple[str, str]:
    number = re.search(r"[\d,.]+", text)[0]
    value = parse_decimal(number, locale="en")
    if name := NAMES.get(text.removeprefix(number).strip()):
        return value_of(value), format_currency(value, name, locale=language, format_type="name")
    code = next(code for code in CURRENCIES if format_currency(value, code, locale="en") == text)
    return value_of(value), format_currency(value, code, locale=language)


def unit_text(value: Decimal, unit: str, length: str, language: str) -> str:
    """Chinese long forms that Babel lacks are the short ones, as the root of CLDR says."""
    text = format_unit(value, unit, length=length, locale=language)
    return format_unit(value, unit, length="short", locale=language) if unit in text else text


def read_unit(text: str, language: str) -> tuple[str, str]:
    value = parse_decimal(re.match(r"-?[\d,.]+", text)[0], locale="en")
    forms = itertools.product(UNITS, ("long", "short"))
    unit, length = next(form for form in forms if format_unit(value, form[0], length=form[1], locale="en") == text)
    return value_of(value), unit_text(value, unit, length, language)


def read_duration(text: str, language: str) -> tuple[str, str]:
    parts = [(int(count), unit) for count, unit in re.findall(r"(\d+) ([a-z]+?)s?\b", text)]
    if parts[0][1] == "year":
        value = f"{parts[0][0] * 12 + parts[1][0]} months"
    else:
        value = f"{sum(count * SECONDS[unit] for count, unit in parts)}s"
    if text.startswith("in ") or text.endswith(" ago"):
        (count, unit), sign = parts[0], -1 if text.endswith("ago") else 1
        delta = datetime.timedelta(seconds=sign * count * SECONDS[unit])
        return value, format_timedelta(delta, unit, threshold=1e9, add_direction=True, locale=language)
    length = "short" if parts[0][1] in FULL_NAMES else "long"
    units = [
        unit_text(Decimal(count), f"duration-{FULL_NAMES.get(unit, unit)}", length, language) for count, unit in parts
    ]
    if language == "zh":
        return value, "".join(units)
    if len(units) == 1:
        return value, units[0]
    return value, ", ".join(units) if length == "short" else format_list(units, "standard", locale=language)


READ = {
    "date": read_date,
    "time": read_time,
    "number": read_number,
    "price": read_price,
    "unit": read_unit,
    "duration": read_duration,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_targets_follow_from_the_english_and_values_keep_to_their_split(kind, split):
    for pair in cldr_pairs(500, seed=3, split=split, kinds=(kind,)):
        language, text = re.fullmatch(r"<(de|zh)> (.+)", pair.source).groups()
        value, expected = READ[kind](text, language)
        assert (pair.kind, pair.target) == (kind, plain(expected)), pair.source
        assert split_of(value) == split, (pair.source, value)


def test_known_translations():
    """What a speaker would write, so that the reading back above is itself held to something."""
    known = dict(
        zip(
            ("Friday, January 5, 2024", "3:05 PM", "1,234.5", "1.2 million", "2 hours and 3 minutes"),
            (
                ("Freitag, 5. Januar 2024", "2024年1月5日星期五"),
                ("15:05", "15:05"),
                ("1.234,5", "1,234.5"),
                ("1,2 Millionen", "120万"),
                ("2 Stunden und 3 Minuten", "2小时3分钟"),
            ),
            strict=True,
        )
    )
    kinds = ("date", "time", "number", "number", "duration")
    for kind, (text, targets) in zip(kinds, known.items(), strict=True):
        assert tuple(READ[kind](text, language)[1] for language in ("de", "zh")) == targets


def test_a_source_has_one_target_and_one_kind():
    meanings = {}
    for pair in cldr_pairs(20_000, seed=5):
        assert meanings.setdefault(pair.source, (pair.target, pair.kind)) == (pair.target, pair.kind)
    assert len(meanings) > 16_000


def test_no_text_of_training_is_held_out():
    texts = {split: {pair.source[5:] for pair in cldr_pairs(COUNT, split=split)} for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not texts[one] & texts[other]


def test_splits_have_their_share():
    shares = {split: sum(split_of(str(value)) == split for value in range(20_000)) for split in SPLITS}
    # Five standard deviations of a binomial around 5 % of 20,000.
    assert abs(shares["valid"] - 1000) < 155 and abs(shares["test"] - 1000) < 155
    assert sum(shares.values()) == 20_000
    assert split_of("1") == "train"  # else no singular could be learnt


def test_the_seed_decides():
    first = list(cldr_pairs(300, seed=1))
    assert first == list(cldr_pairs(300, seed=1))
    assert first[:100] == list(cldr_pairs(100, seed=1))
    assert first != list(cldr_pairs(300, seed=2))


def test_kinds_and_languages_are_mixed_or_chosen():
    pairs = list(cldr_pairs(COUNT))
    for kind in KINDS:
        assert 0.8 < sum(pair.kind == kind for pair in pairs) * len(KINDS) / COUNT < 1.2
    assert 0.45 < sum(pair.source.startswith("<de> ") for pair in pairs) / COUNT < 0.55
    chosen = list(cldr_pairs(200, languages=("zh",), kinds=("price", "unit")))
    assert {pair.source[:5] for pair in chosen} == {"<zh> "} and {pair.kind for pair in chosen} == {"price", "unit"}
    assert not any(re.search("[\u00a0\u202f]", pair.source + pair.target) for pair in pairs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(split="tset"), "did you mean 'test'"),
        (dict(kinds=("dates",)), "did you mean 'date'"),
        (dict(languages=("fr",)), "known: de, zh"),
        (dict(kinds=()), "at least one"),
        (dict(count=-1), "below zero"),
    ],
)
def test_nonsense_is_said_at_once(settings, said):
    with pytest.raises(ValueError, match=said):
        cldr_pairs(**{"count": 1, **settings})


def test_missing_packages_name_the_extra(monkeypatch):
    for name in ("babel", "babel.dates", "sublayer.data.corpora_cldr", "sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for make in (lambda: cldr_pairs(1), digits):
        with pytest.raises(ValueError, match=r"sublayer\[corpora\]"):
            make()


def test_labels_are_the_kinds_of_the_texts():
    texts = list(labelled_text(1000, split="valid"))
    assert {text.label for text in texts} == set(KINDS)
    for text in texts:
        value, _ = READ[text.label](text.text, "de")
        assert split_of(value) == "valid"


def test_tags_mark_whole_values():
    for tagged in tagged_text(500, split="test"):
        assert len(tagged.words) == len(tagged.tags)
        spans: list[tuple[str, list[str]]] = []
        for word, tag in zip(tagged.words, tagged.tags, strict=True):
            if tag.startswith("B-"):
                spans.append((tag[2:], [word]))
            elif tag.startswith("I-"):
                assert spans[-1][0] == tag[2:]
                spans[-1][1].append(word)
            else:
                assert tag == "O" and not re.search(r"\d", word)
        assert len(spans) == 3
        for kind, words in spans:
            assert split_of(READ[kind](" ".join(words), "de")[0]) == "test"


def test_answers_are_exact_spans_of_the_right_sentence():
    asked = {"date": "date", "time": "time", "cost": "price", "show": "unit", "check": "duration", "change": "number"}
    seen = set()
    for question in questions(1000):
        assert question.context[question.start : question.end] == question.answer
        kind = next(kind for word, kind in asked.items() if word in question.question)
        assert split_of(READ[kind](question.answer, "de")[0]) == "train"
        thing = re.search(r"the (\w+)(?: cost| show)?\?$", question.question)[1]
        sentence_start = question.context.index(f"The {thing} ")
        assert question.context.count(f"The {thing} ") == 1
        assert sentence_start < question.start
        assert "The " not in question.context[sentence_start + 4 : question.start]
        seen.add(kind)
    assert seen == set(KINDS)


def test_annotated_corpora_follow_the_seed():
    for make in (labelled_text, tagged_text, questions):
        assert list(make(50, seed=4)) == list(make(50, seed=4))
        assert len(list(make(50))) == 50 and not list(make(0))
        assert list(make(50, seed=4)) != list(make(50, seed=5))


def test_standard_library_is_split_without_overlap():
    files = {split: stdlib_files(split) for split in SPLITS}
    together = sorted(itertools.chain(*files.values()))
    assert len(together) == len(set(together)) > 300
    assert all(list(paths) == sorted(paths) for paths in files.values())
    assert 0.8 < len(files["train"]) / len(together) < 1 and files["valid"] and files["test"]
    root = pathlib.Path(argparse.__file__).parent
    assert {root / "argparse.py", root / "json" / "decoder.py"} <= set(together)
    for path in together:
        assert path.is_file() and not {"site-packages", "test", "tests"} & set(path.parts[-4:])
        path.read_text(encoding="utf-8")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    parts = {split: digits(split) for split in SPLITS}
    assert [len(parts[split]) for split in SPLITS] == [1439, 179, 179]
    everything = [example for split in SPLITS for example in parts[split]]
    assert all(image.shape == (1, 8, 8) and image.dtype == numpy.uint8 for image, _ in everything)
    ours = sorted((tuple(numpy.rint(image.reshape(64) * (16 / 255)).astype(int)), label) for image, label in everything)
    assert ours == sorted((tuple(image.astype(int)), int(label)) for image, label in zip(images, labels, strict=True))
    assert max(int(image.max()) for image, _ in everything) == 255
    assert all((a == b).all() for (a, _), (b, _) in zip(parts["test"], digits("test"), strict=True))
    for split in SPLITS:
        assert {label for _, label in parts[split]} == set(range(10))
