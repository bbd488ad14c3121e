"""Rows come back as other people's writers wrote them, and every kind of broken file is told in one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from sublayer.data import readers
from sublayer.data.formats import PIECE
from sublayer.data.readers import DataError, Row, Skipped, find_files, fingerprint, read_dataset, read_rows

PAIR = ("source", "target")
PACKINGS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
# Any character but half of a surrogate pair, which is none.
characters = st.characters(exclude_categories=("Cs",))
texts = st.text(characters, min_size=1).filter(lambda text: text.strip() and not text.startswith("\ufeff"))
one_line = texts.filter(lambda text: not set(text) & set("\n\r"))
cells = one_line.filter(lambda text: "\t" not in text and text.casefold() not in PAIR)


def csv_bytes(rows):
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()


def tsv_bytes(rows):
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def jsonl_bytes(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet_bytes(columns, **options):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out, **options)
    return out.getvalue()


def rows_of(content, name, columns=("text",), **options):
    """What is read back from a file of this name with this content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        return list(read_rows([path], columns, **options))


def values_of(content, name, columns=("text",), **options):
    return [tuple(row.values[column] for column in columns) for row in rows_of(content, name, columns, **options)]


def refused(content, name, columns=("text",), **options):
    with pytest.raises(DataError) as caught:
        rows_of(content, name, columns, **options)
    message = str(caught.value)
    assert "\n" not in message and name in message
    return message


# Round trips


@pytest.mark.parametrize("ending", PACKINGS)
@hypothesis.given(rows=st.lists(st.tuples(cells, cells), min_size=1), header=st.booleans())
def test_tsv_round_trip(ending, rows, header):
    content = tsv_bytes([PAIR, *rows] if header else rows)
    assert values_of(PACKINGS[ending](content), f"a.tsv{ending}", PAIR) == rows


@pytest.mark.parametrize("ending", PACKINGS)
@hypothesis.given(rows=st.lists(st.tuples(texts, texts, st.text(characters)), min_size=1))
def test_csv_round_trip(ending, rows):
    content = csv_bytes([("target", "source", "label"), *rows])
    read = values_of(PACKINGS[ending](content), f"a.csv{ending}", ("target", "source", "label"))
    assert read == rows


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(characters),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(characters), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("ending", PACKINGS)
@hypothesis.given(rows=st.lists(st.tuples(texts, json_values), min_size=1))
def test_jsonl_round_trip(ending, rows):
    content = b"\n".join(jsonl_bytes([{"answer": answer, "text": text, "id": 7}]) for text, answer in rows)
    assert values_of(PACKINGS[ending](content), f"a.jsonl{ending}", ("text", "answer")) == rows


@pytest.mark.parametrize("ending", PACKINGS)
@hypothesis.given(rows=st.lists(st.tuples(texts, st.lists(st.integers(-9, 9))), min_size=1), group=st.integers(1, 4))
def test_parquet_round_trip(ending, rows, group):
    columns = {"tags": [tags for _, tags in rows], "text": [text for text, _ in rows]}
    content = PACKINGS[ending](parquet_bytes(columns, row_group_size=group))
    assert values_of(content, f"a.parquet{ending}", ("text", "tags")) == rows


@pytest.mark.parametrize("ending", PACKINGS)
@hypothesis.given(lines=st.lists(one_line, min_size=1), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_text_lines_round_trip(ending, lines, end, last):
    content = PACKINGS[ending]((end.join(lines) + end * last).encode())
    rows = rows_of(content, f"a.txt{ending}")
    assert [row.values["text"] for row in rows] == lines
    assert [row.number for row in rows] == list(range(1, len(lines) + 1))


@hypothesis.given(blocks=st.lists(st.lists(one_line, min_size=1), min_size=1), gap=st.sampled_from(["\n", "\n \n\n"]))
def test_paragraphs_are_the_blocks_between_blank_lines(blocks, gap):
    content = gap.join("".join(line + "\n" for line in block) for block in blocks).encode()
    assert values_of(content, "a.md", documents="paragraph") == [("\n".join(block),) for block in blocks]


# Pieces are 64 KiB in use; at 16 bytes every cut through a character and a line end is tried.
@hypothesis.given(text=st.text(st.sampled_from("a é漢🙂\n\r\0\ufeff")).filter(lambda text: text.strip("\ufeff \r\n")))
def test_pieces_of_a_file_join_to_its_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sublayer.data.formats.PIECE", 16)
        rows = rows_of(text.encode(), "a.txt", documents="file")
    expected = text.removeprefix("\ufeff").replace("\r\n", "\n")
    read = "".join(row.values["text"] for row in rows)
    assert expected.endswith(read) and not expected.removesuffix(read).strip()  # a blank piece at the start is dropped
    assert [row.values["continued"] for row in rows] == [False] + [True] * (len(rows) - 1)
    assert all(len(row.values["text"].encode()) <= 17 + 3 for row in rows)


def test_pieces_are_cut_at_line_ends():
    content = b"".join(b"%07d\n" % n for n in range(20_000))  # 160,000 bytes
    rows = rows_of(content, "a.txt", documents="file")
    assert [len(row.values["text"]) for row in rows] == [PIECE, PIECE, 160_000 - 2 * PIECE]
    assert [row.number for row in rows] == [1, PIECE // 8 + 1, PIECE // 4 + 1]


def test_each_file_is_a_document_of_its_own(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\n{name}\n")
    rows = list(read_rows(find_files(str(tmp_path)), ["text"], documents="file"))
    assert [row.values for row in rows] == [{"text": f"{name}\n\n{name}\n", "continued": False} for name in "ab"]


@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv", "a.jsonl"])
def test_byte_order_mark_is_dropped(name):
    content = b'{"text": "one"}\n' if name == "a.jsonl" else b"one\r\n"
    assert values_of(b"\xef\xbb\xbf" + content, name) == [("one",)]


# Columns


def test_headerless_tables_give_their_last_columns():
    content = tsv_bytes([("news", "dog", "Hund"), ("news", '"cat', "Katze")])
    assert values_of(content, "a.tsv", PAIR) == [("dog", "Hund"), ('"cat', "Katze")]


def test_names_say_what_the_columns_are():
    content = tsv_bytes([("Hund", "news", "dog")])
    assert values_of(content, "a.tsv", PAIR, names=["target", "domain", "source"]) == [("dog", "Hund")]
    assert "did you mean 'tagret'?" in refused(content, "a.tsv", PAIR, names=["tagret", "domain", "source"])
    assert "expected 2" in refused(content, "a.tsv", PAIR, names=["source", "target"])
    assert "2 columns are called 'target'" in refused(content, "a.tsv", PAIR, names=["target", "target", "source"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", csv_bytes([("de", "en"), ("Hund", "dog")])),
        ("a.jsonl", jsonl_bytes([{"de": "Hund", "en": "dog", "fr": "chien"}])),
        ("a.parquet", parquet_bytes({"de": ["Hund"], "fr": ["chien"], "en": ["dog"]})),
    ],
)
def test_columns_may_have_other_names_in_the_file(name, content):
    (row,) = rows_of(content, name, {"source": "en", "target": "de"})
    assert row.values == {"source": "dog", "target": "Hund"}
    message = refused(content, name, {"source": "eng", "target": "de"})
    assert "'eng'; did you mean 'en'?" in message and "de" in message


def test_a_header_with_a_slip_is_not_taken_for_data():
    message = refused(csv_bytes([("text", "lable"), ("fine", "good")]), "a.csv", ("text", "label"))
    assert "row 1" in message and "did you mean 'lable'?" in message
    assert "did you mean 'Source'?" in refused(b"Source\tTarget\na\tb\n", "a.tsv", PAIR)
    assert values_of(b"Source\tTarget\n", "a.tsv", PAIR, names=PAIR) == [("Source", "Target")]


def test_a_mapped_column_needs_a_header():
    long = "word " * 1000
    message = refused(csv_bytes([(long, "line\nline")]), "a.csv", {"source": "en", "target": "de"})
    assert "'en'" in message and len(message) < 400


def test_plain_text_has_one_column():
    assert "TSV" in refused(b"dog\n", "a.txt", PAIR)
    assert values_of(b"dog\n", "a.txt", {"source": "text"}) == [("dog",)]


def test_numbers_of_rows_are_lines_of_the_file():
    rows = rows_of(csv_bytes([PAIR, ("a\nb", "c"), ("d", "e")]), "a.csv", PAIR)
    assert [row.number for row in rows] == [2, 4]
    assert rows[1].where() == f"{rows[1].file}, row 4"
    rows = rows_of(b"\n\none\n\ntwo\nthree\n", "a.txt", documents="paragraph")
    assert [(row.number, row.values["text"]) for row in rows] == [(3, "one"), (5, "two\nthree")]


# Rows that cannot be used

BAD = {
    "invalid UTF-8": ("a.tsv", b"good\tgut\nab\xffc\td\nfine\tfein\n", "row 2: is not valid UTF-8 at byte 2 "),
    "too long": (
        "a.tsv",
        b"good\tgut\n" + b"x" * 90 + b"\ty\nfine\tfein\n",
        "row 2: is longer than 80 bytes; split it",
    ),
    "wrong number of columns": ("a.tsv", b"good\tgut\nalone\nfine\tfein\n", "row 2: has 1 column; expected 2"),
    "broken JSON": (
        "a.jsonl",
        b'{"source": "good", "target": "gut"}\n{"source": \n{"source": "fine", "target": "fein"}\n',
        "row 2: is not valid JSON",
    ),
    "missing column": (
        "a.jsonl",
        b'{"source": "good", "target": "gut"}\n{"source": "a", "targt": "b"}\n{"source": "fine", "target": "fein"}\n',
        "row 2: unknown column 'target'; did you mean 'targt'?",
    ),
    "broken CSV": ("a.csv", b'good,gut\n"a"b,c\nfine,fein\n', "row 2: is not valid CSV"),
    "not text": (
        "a.jsonl",
        b'{"source": "good", "target": "gut"}\n{"source": "a", "target": 5}\n{"source": "fine", "target": "fein"}\n',
        "row 2: column 'target' holds int; expected text",
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_rows_stop_or_are_skipped_and_counted(reason):
    name, content, sentence = BAD[reason]
    assert sentence in refused(content, name, PAIR, max_row_bytes=80)
    skipped = Skipped()
    read = values_of(content, name, PAIR, max_row_bytes=80, on_error="skip", skipped=skipped)
    assert read == [("good", "gut"), ("fine", "fein")]
    assert skipped.counts == {reason: 1} and skipped.count == 1
    assert skipped.first[reason].endswith("row 2")
    assert f"skipped 1 {reason} (first: " in str(skipped) and "\n" not in str(skipped)


@pytest.mark.parametrize("document", ["[1]", "3", '"text"', "null", "[" * 100_000, "9" * 10_000, '{"text": "\\ud800"}'])
def test_json_that_is_no_object_of_text(document):
    assert "row 1: " in refused(document.encode() + b"\n", "a.jsonl")


def test_bad_parquet_rows():
    assert "row 2: column 'text' holds int" in refused(parquet_bytes({"text": [None, 1]}), "a.parquet")
    assert "row 1: column 'text' holds bytes" in refused(parquet_bytes({"text": [b"a"]}), "a.parquet")
    halves = pyarrow.array([b"good", b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string())
    assert "row 2: is not valid UTF-8 at byte 0" in refused(parquet_bytes({"text": halves}), "a.parquet")
    assert "longer than 4 bytes" in refused(parquet_bytes({"text": ["漢字"]}), "a.parquet", max_row_bytes=4)
    assert values_of(parquet_bytes({"text": [1]}), "a.parquet", text=()) == [(1,)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", b"one\teins\n\n \t\t \nleft\t\n\tright\n \ttwo\nthree\tdrei\n"),
        ("a.csv", b'one,eins\n\n"",""\nleft,\n,right\n" ",two\nthree,drei\n'),
    ],
)
def test_rows_without_text_are_counted_and_never_stop(name, content):
    skipped = Skipped()
    assert values_of(content, name, PAIR, skipped=skipped) == [("one", "eins"), ("three", "drei")]
    assert skipped.counts == {"empty": 5} and skipped.first["empty"].endswith("row 2")


@pytest.mark.parametrize("documents", ["line", "paragraph", "file"])
def test_invalid_utf8_is_found_at_its_byte(documents):
    content = b"good\n" * 30_000 + b"x" * 70_000 + "é".encode() + b"\xc3(\n\nlast\n"
    message = refused(content, "a.txt", documents=documents)
    assert "row 30001: " in message and "at byte 70,002 " in message
    kept = "".join(row.values["text"] for row in rows_of(content, "a.txt", documents=documents, on_error="skip"))
    assert kept.count("good") == (0 if documents == "paragraph" else 30_000)
    assert "\ufffd" not in kept and kept.endswith("last\n" if documents == "file" else "last")


@hypothesis.given(limit=st.integers(1, 40), lines=st.lists(st.text("ab", min_size=1, max_size=60), min_size=1))
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_up_to_the_limit_are_read(end, limit, lines):
    content = (end.join(["", "ok" if limit > 1 else "o", *lines]) + end).encode()
    read = values_of(content, "a.txt", max_row_bytes=limit, on_error="skip")
    assert read[1:] == [(line,) for line in lines if len(line) <= limit]


@pytest.mark.parametrize(
    "middle", [b'"a,\n' + b"x\n" * 50 + b'b",c\n', b'"' + b"x" * 99 + b'\n",c\n', b"x" * 99 + b",c\n"]
)
def test_a_long_csv_record_is_left_out_whole(middle):
    read = values_of(b"one,eins\n" + middle + b"two,zwei\n", "a.csv", PAIR, max_row_bytes=60, on_error="skip")
    assert read == [("one", "eins"), ("two", "zwei")]


def test_an_invalid_csv_record_is_left_out_whole():
    content = b'one,eins\n"a\xff\nb,c\nd",e\ntwo,zwei\n'
    assert values_of(content, "a.csv", PAIR, on_error="skip") == [("one", "eins"), ("two", "zwei")]
    assert "row 2: is not valid UTF-8 at byte 2 " in refused(content, "a.csv", PAIR)


def test_a_quote_that_is_never_closed():
    assert "row 2: is not valid CSV" in refused(b'one,eins\n"two,zwei\nthree,drei\n', "a.csv", PAIR)


def test_long_csv_fields_are_read():
    long = "x" * 200_000  # beyond the csv module's own limit
    assert values_of(csv_bytes([(long, "y")]), "a.csv", PAIR) == [(long, "y")]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.csv", "a.jsonl.gz"])
def test_a_long_line_is_never_held_whole(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(PACKINGS[path.suffix if path.suffix in PACKINGS else ""](b"x" * (24 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"row 1: is longer than 1,000 bytes; split it, or raise data\.max_row_bytes"
        ):
            list(read_rows([path], ["text"], max_row_bytes=1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


# Whole files


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("documents", ["line", "paragraph", "file"])
def test_a_file_without_rows(content, documents):
    assert "a.txt is empty" in refused(content, "a.txt", documents=documents)


def test_one_empty_file_among_several_is_counted(tmp_path):
    (tmp_path / "a.csv").write_text("source,target\n")
    (tmp_path / "b.csv").write_text("source,target\none,eins\n")
    skipped = Skipped()
    assert len(list(read_rows(find_files(str(tmp_path)), PAIR, skipped=skipped))) == 1
    assert skipped.counts == {"empty file": 1} and skipped.first["empty file"].endswith("a.csv")
    with pytest.raises(DataError, match=r"a\.csv is empty"):
        list(read_rows([tmp_path / "a.csv"], PAIR))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_truncated_or_foreign_archives(ending, name):
    content = (
        parquet_bytes({"text": ["one"] * 99}) if name == "a.parquet" else os.urandom(50_000).hex().encode() + b"\n"
    )
    packed = PACKINGS[ending](content)
    for broken in (packed[:-1], packed[: len(packed) // 2], packed[:5], b"plain text\n", packed + b"garbage"):
        message = refused(broken, f"{name}{ending}", max_row_bytes=1 << 20)
        assert f"is not a complete {'gzip' if ending == '.gz' else 'zstd'} file" in message


def test_archives_of_several_parts_are_read_to_the_end():
    for ending in (".gz", ".zst"):
        packed = PACKINGS[ending](b"one\n") + PACKINGS[ending](b"two\n")
        assert values_of(packed, f"a.txt{ending}") == [("one",), ("two",)]


@hypothesis.given(data=st.data())
def test_damaged_parquet_is_told_in_one_line(data):
    content = bytearray(parquet_bytes({"text": [str(n) for n in range(50)]}))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, len(content) // 2, len(content)]))
    try:
        rows = rows_of(bytes(content[:cut]), "a.parquet")
    except DataError as error:
        message = str(error)
    else:
        message = "" if all(isinstance(row.values["text"], str) for row in rows) else "not text\n"
    assert "\n" not in message


@pytest.mark.parametrize("change", ["append", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_bytes([{"text": "one"}] * 3))
    rows = read_rows([path], ["text"])
    assert next(rows) == Row({"text": "one"}, str(path), 1)
    if change == "append":
        path.write_bytes(path.read_bytes() + b'{"text": "ha')  # a row that is still being written
    elif change == "replace":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read; run again"):
        list(rows)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(read_rows([tmp_path / "a.txt"], ["text"]))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        fingerprint([tmp_path / "a.txt"])


def test_choices_are_checked_before_anything_is_read():
    for options, near in (({"documents": "lines"}, "'line'"), ({"on_error": "skp"}, "'skip'")):
        with pytest.raises(DataError, match=f"did you mean {near}"):
            read_rows([], ["text"], **options)
    with pytest.raises(DataError, match="no column"):
        read_rows([], [])
    with pytest.raises(DataError, match="no file"):
        read_rows([], ["text"])
    with pytest.raises(DataError, match="max_row_bytes is 0"):
        read_rows([], ["text"], max_row_bytes=0)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"pip install 'sublayer\[files\]'"):
        list(read_rows([path], ["text"]))


# Which files


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.TXT.GZ", "sub/deep/d.jsonl", ".hidden.txt", ".git/e.txt", "a[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def names(tree, where):
    return [path.relative_to(tree).as_posix() for path in find_files(where)]


def test_folders_globs_files_and_lists(tree):
    everything = ["a.txt", "a[1].txt", "b.txt", "sub/c.TXT.GZ", "sub/deep/d.jsonl"]
    assert names(tree, str(tree)) == everything
    assert names(tree, f"{tree}/*.txt") == ["a.txt", "a[1].txt", "b.txt"]
    assert names(tree, f"{tree}/**/*.jsonl") == ["sub/deep/d.jsonl"]
    assert names(tree, f"{tree}/a[1].txt") == ["a[1].txt"]  # a file's own name comes before the glob it also is
    assert names(tree, f"{tree}/.hidden.txt") == [".hidden.txt"]
    assert names(tree, [f"{tree}/b.txt", f"{tree}/*.txt"]) == ["b.txt", "a.txt", "a[1].txt"]
    assert names(tree, tree / "sub") == everything[3:]


def test_names_that_stand_for_no_data(tree):
    (tree / "nothing").mkdir()
    (tree / "link.txt").symlink_to(tree / "gone.txt")
    for where, sentence in (
        (f"{tree}/x*.txt", "matches no file"),
        (f"{tree}/absent.txt", "matches no file"),
        (f"{tree}/nothing", "is an empty folder"),
        (f"{tree}/link.txt", "broken link"),
        ([], "no file was named"),
        ("", "no file was named"),
    ):
        with pytest.raises(DataError, match=sentence):
            find_files(where)
    (tree / "sub" / "data.json").write_bytes(b"")
    for where in (f"{tree}/sub", f"{tree}/sub/*.json"):
        with pytest.raises(DataError, match=r"data\.json has an unknown ending.*\.jsonl.*\.parquet.*\.zst"):
            find_files(where)


def test_fingerprint_is_of_content_and_order(tmp_path):
    def made(*contents, names="abc", ending="txt"):
        paths = [tmp_path / f"{name}.{ending}" for name, _ in zip(names, contents, strict=False)]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        return fingerprint(paths)

    assert made(b"ab", b"c") == made(b"ab", b"c", names="xy")
    different = [made(b"ab", b"c"), made(b"c", b"ab"), made(b"a", b"bc"), made(b"abc"), made(b"abc", b""), made(b"")]
    different.append(made(b"ab", b"c", ending="tsv"))
    assert len(set(different)) == len(different)
    read: list[int] = []
    (tmp_path / "big.txt").write_bytes(bytes(3 << 20))
    fingerprint([tmp_path / "big.txt"], read.append)
    assert sum(read) == 3 << 20 and len(read) > 1


# Datasets


def test_rows_of_a_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "train.csv").write_text("en,de\ndog,Hund\n,leer\ncat,Katze\n")
    (tmp_path / "test.csv").write_text("en,de\nbird,Vogel\n")
    given, load = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: given.append(k) or load(*a, **k))
    columns, skipped = {"source": "en", "target": "de"}, Skipped()
    rows = list(read_dataset(str(tmp_path), columns, "train", skipped=skipped))
    assert [row.values for row in rows] == [{"source": "dog", "target": "Hund"}, {"source": "cat", "target": "Katze"}]
    assert rows[1].where() == f"{tmp_path}[train], row 3" and skipped.counts == {"empty": 1}
    assert [row.values["target"] for row in read_dataset(str(tmp_path), columns, "test")] == ["Vogel"]
    assert all(options["streaming"] is True and "trust_remote_code" not in options for options in given)
    absent = {"source": "en", "target": "german"}
    for split, wanted, sentence in (("valid", columns, "cannot be read"), ("test", absent, "unknown column 'german'")):
        with pytest.raises(DataError, match=sentence) as caught:
            list(read_dataset(str(tmp_path), wanted, split))
        assert "\n" not in str(caught.value)


def test_every_kind_has_a_reader():
    assert set(readers.ENDINGS.values()) == set(readers.READERS)
