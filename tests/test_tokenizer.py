"""Tokenizers: trained ones against the mathematics of their kind, files against the libraries that wrote them."""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from sublayer.data import Tokenizer
from sublayer.data.tokenizer_files import read_ranks, read_sentencepiece, sentencepiece_tokenizer, tiktoken_tokenizer
from sublayer.data.tokenizer_train import train_tokenizer

transformers.logging.set_verbosity_error()
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "A film that is a joy to watch, from the first scene to the last scene!",
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "今天天气很好，我们去公园散步吧。今天我们去看电影。",
    "机器学习模型需要很多数据 and a lot of patience, a lot of data.",
    "Naïve café owners don't like 12345 puzzles; the owners like 12 cafés.",
    "On 5 May the watchers watched; on 6 May the sleepers slept.",
]
TEXTS = [
    *("", " ", "  two  spaces  ", "the quick fox", "Paris,Berlin", "12345 67", "tabs\tand\nlines\r\n\n", "a" * 70),
    *(
        "今天天气 很好！",
        "机器 🚀🙂 data",
        "👩\u200d👩\u200d👧",
        "naïve cafe\u0301",
        "が か\u3099 한 \u1112\u1161\u11ab",
    ),
    *("Ａｂｃ①…ﬁ～", "unſeen Ω≈ç√"),
]
SPECIAL = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "bos": "<s>", "mask": "<mask>"}
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
KINDS = ("bpe", "unigram", "wordpiece")
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("the café 今天 \n🚀")), max_size=30)


def trained(kind: str = "bpe", **changes: Any) -> Tokenizer:
    return train_tokenizer(CORPUS, **(dict(kind=kind, vocab_size=400, special=SPECIAL) | changes))


@functools.cache
def shared(kind: str, special: tuple[tuple[str, str], ...] = tuple(SPECIAL.items()), **options: Any) -> Tokenizer:
    return trained(kind, special=dict(special), **options)


def bert() -> Tokenizer:
    return shared("wordpiece", tuple(BERT.items()), lowercase=True, template="[CLS] $0 [SEP]")


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        action()
    message = str(caught.value)
    assert message.isprintable(), message
    return message


# Training


@given(TEXT)
def test_byte_level_gives_every_text_back(text: str) -> None:
    tokenizer = shared("bpe", special=(("eos", "\ue000</s>"),))
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_bpe_learns_the_most_frequent_pair_first() -> None:
    """Sennrich et al. 2016: the first merge is the pair seen most often, the next that after merging it."""
    tokenizer = train_tokenizer(["abab abab ab ba", "cab"], vocab_size=260, special={"eos": "</s>"})
    merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
    words = [list(word) for word in ("abab", "Ġabab", "Ġab", "Ġba", "cab")]
    for left, right in merges:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        assert pairs[left, right] == max(pairs.values())
        words = [re.sub(f"(?<!\\S){left} {right}(?!\\S)", left + right, " ".join(word)).split(" ") for word in words]


@given(st.lists(st.sampled_from([*"abcdeghinopstw", " ", "the", "watch", "今", "好"]), max_size=12).map("".join))
def test_unigram_finds_the_likeliest_pieces(text: str) -> None:
    """Kudo 2018: of all ways to write a text in pieces, that of the largest sum of log-probabilities."""
    tokenizer = shared("unigram")
    scores = dict(json.loads(tokenizer.backend.to_str())["model"]["vocab"])
    words = ["▁" + word for word in text.split()]
    ids = tokenizer.encode(text, special=False)
    pieces = [tokenizer.backend.id_to_token(number) for number in ids]
    assert "".join(pieces) == "".join(words)
    best = 0.0
    for word in words:
        table = [0.0] + [-math.inf] * len(word)
        for end in range(1, len(word) + 1):
            table[end] = max(table[start] + scores.get(word[start:end], -math.inf) for start in range(end))
        best += table[-1]
    assert sum(scores[piece] for piece in pieces) == pytest.approx(best, abs=1e-6)


@given(st.text("thecawdogsxyz ", max_size=20))
def test_wordpiece_takes_the_longest_piece_first(text: str) -> None:
    tokenizer, expected = bert(), list[str]()
    for word in text.split():
        pieces, rest = list[str](), word
        while rest:
            marked = ["##" * bool(pieces) + rest[:end] for end in range(len(rest), 0, -1)]
            piece = next((piece for piece in marked if tokenizer.id_of(piece) is not None), None)
            if piece is None:
                pieces, rest = ["[UNK]"], ""
            else:
                pieces, rest = [*pieces, piece], rest[len(piece.removeprefix("##")) :]
        expected += pieces
    assert [tokenizer.backend.id_to_token(number) for number in tokenizer.encode(text, special=False)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_stand_for_no_text(kind: str) -> None:
    tokenizer = trained(kind, extra=["<de>", "<extra_id_0>", "<extra_id_1>"], template="<s> $0 </s>")
    names = [*SPECIAL.values(), "<de>", "<extra_id_0>", "<extra_id_1>"]
    assert [tokenizer.id_of(name) for name in names] == list(range(8))
    assert tokenizer.special_ids() == set(range(8))
    assert tokenizer.sentinels() == [6, 7]
    assert {role: tokenizer.special(role) for role in SPECIAL} == dict(zip(SPECIAL, range(5), strict=True))
    alone = tokenizer.encode("5 May", special=False)
    assert tokenizer.encode("<de> 5 May") == [3, 5, *alone, 1]
    assert tokenizer.decode(tokenizer.encode("<de> 5 May")) == "5 May"
    assert tokenizer.encode("the <mask>", special=False) == [*tokenizer.encode("the", special=False), 4]


def test_templates_go_around_one_text_and_two() -> None:
    one, two, tokenizer = "the fox", "a joy", bert()
    cls, sep = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    first, second = (tokenizer.encode(text, special=False) for text in (one, two))
    assert tokenizer.encode(one) == [cls, *first, sep]
    ids, types = tokenizer.encode_pairs([(one, two)])[0]
    assert ids == [cls, *first, sep, *second, sep]
    assert types == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    plain = trained()
    both = plain.encode(one) + plain.encode(two)
    assert plain.encode_pairs([(one, two)])[0] == (both, [0] * len(plain.encode(one)) + [1] * len(plain.encode(two)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_give_the_same_vocabulary(kind: str) -> None:
    """In a process of its own, since what the library leaves to chance is drawn once for each process."""
    program = (
        "import json, sys; from sublayer.data.tokenizer_train import train_tokenizer\n"
        "texts, options = json.load(sys.stdin); print(train_tokenizer(texts, **options).fingerprint())"
    )
    options = dict(kind=kind, vocab_size=400 if kind == "bpe" else 120, special=SPECIAL)
    # Words that occur once or twice: almost every choice is between pairs and pieces that are equally frequent.
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijkl", k=draw.randint(3, 8))) for _ in range(800)]
    texts = [" ".join(words[start : start + 6]) for start in range(0, 800, 3)]
    asked = json.dumps([[[text] for text in texts], options])
    found = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == train_tokenizer(iter(texts), **options).fingerprint()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [SPECIAL, {"unk": "<unk>"}, {}])
def test_the_smallest_size_named_is_enough(kind: str, special: dict[str, str]) -> None:
    if kind == "wordpiece" and not special:
        assert "'unk'" in refusal(lambda: trained(kind, special=special))
        return
    said = refusal(lambda: trained(kind, special=special, vocab_size=5))
    smallest = int(said.rsplit(" ", 1)[1])
    assert trained(kind, special=special, vocab_size=smallest).vocab_size == smallest
    assert str(smallest) in refusal(lambda: trained(kind, special=special, vocab_size=smallest - 1))
    assert trained(kind, special=special, vocab_size=10**5).vocab_size < 2000
    sizes = range(smallest, smallest + 30, 9)
    assert [trained(kind, special=special, vocab_size=size).vocab_size for size in sizes] == list(sizes)


def test_unigram_without_unk_falls_back_on_bytes() -> None:
    tokenizer = trained("unigram", special={"eos": "</s>"}, vocab_size=600)
    ids = tokenizer.encode("the ☃ fox", special=False)
    snow = [number for number in ids if tokenizer.is_byte(number)]
    assert bytes(int(str(tokenizer.backend.id_to_token(number))[3:5], 16) for number in snow) == "☃".encode()
    assert tokenizer.decode(ids) == "the ☃ fox"
    # A special token is not found in what normalisation makes: ＜/s＞ is the text, not the end of it.
    assert tokenizer.id_of("</s>") not in tokenizer.encode("＜/s＞")
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def test_what_cannot_be_trained_is_refused() -> None:
    assert "did you mean 'unigram'?" in refusal(lambda: trained("unigramm"))
    assert "no text" in refusal(lambda: train_tokenizer([], special=SPECIAL))
    assert "no text" in refusal(lambda: train_tokenizer(["", " \n"], kind="unigram", special=SPECIAL))
    assert "one text" in refusal(lambda: train_tokenizer("abc", special=SPECIAL))
    assert "text 1 is of type NoneType" in refusal(lambda: train_tokenizer([["a"], ["b", None]], special=SPECIAL))
    assert "role" in refusal(lambda: trained(special={"end": "</s>"}))
    assert "twice" in refusal(lambda: trained(extra=["<pad>"]))
    assert "$0" in refusal(lambda: trained(template="<s>"))
    assert "</z>" in refusal(lambda: trained(template="$0 </z>"))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_saved(tmp_path: Path, kind: str) -> None:
    tokenizer = trained(kind, extra=["<de>"], template="<s> $0 </s>")
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "of another"}')
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = Tokenizer.load(tmp_path)
    for role in SPECIAL:
        assert getattr(theirs, f"{role}_token_id") == tokenizer.special(role) == again.special(role)
    for text in [*TEXTS, *CORPUS, "<de> 5 May </s>", "the <mask> fox"]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids == again.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint() == tokenizer.fingerprint()


# SentencePiece


def sentencepiece_model(**options: Any) -> bytes:
    sentencepiece, out = pytest.importorskip("sentencepiece"), io.BytesIO()
    known = dict(vocab_size=420, model_type="unigram", character_coverage=0.99, hard_vocab_limit=False, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 2), model_writer=out, num_threads=1, **(known | options)
    )
    return out.getvalue()


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True},
        {"normalization_rule_name": "identity", "byte_fallback": True, "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc_cf", "add_dummy_prefix": False},
        {"user_defined_symbols": ["<sep>", "ab", "🚀"], "pad_id": 3, "bos_id": -1, "eos_piece": "<end>"},
    ],
)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    data = sentencepiece_model(model_type=kind, **options)
    (tmp_path / "spiece.model").write_bytes(data)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.load(tmp_path)
    assert ours.vocab_size == theirs.vocab_size()
    for text in [*TEXTS, *CORPUS, "x<sep>y <sep> cab", "literal <0x41> ▁ bytes", "  ", "the-the--the---"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    for role in ("bos", "eos", "pad", "unk"):
        number = getattr(theirs, f"{role}_id")()
        assert ours.special(role) == (None if number < 0 else number)
    assert ours.special_ids() == {n for n in range(theirs.vocab_size()) if theirs.is_control(n) or theirs.is_unknown(n)}
    ours.save(tmp_path / "copy")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert again(TEXTS)["input_ids"] == ours.encode_batch(TEXTS)
    assert again.eos_token_id == ours.special("eos")
    assert Tokenizer.load(tmp_path / "copy").settings["unk_token"] == "<unk>"


@functools.cache
def both_readings() -> tuple[Any, Any]:
    sentencepiece = pytest.importorskip("sentencepiece")
    data = sentencepiece_model(model_type="bpe", byte_fallback=True)
    return sentencepiece.SentencePieceProcessor(model_proto=data), sentencepiece_tokenizer(read_sentencepiece(data))


@given(st.text("abst  .今天🚀é\n▁", max_size=20))
def test_bpe_ids_are_those_of_sentencepiece_on_any_text(text: str) -> None:
    theirs, ours = both_readings()
    assert ours.encode(text).ids == theirs.encode(text)


def test_sentinels_and_the_end_of_a_text_come_from_the_settings(tmp_path: Path) -> None:
    """T5's vocabulary: pad, end and unknown first, the sentinels after the pieces and counted down."""
    sentencepiece = pytest.importorskip("sentencepiece")
    data = sentencepiece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    size = theirs.vocab_size()
    (tmp_path / "spiece.model").write_bytes(data)
    added = {str(size + 4): {"content": "<de>", "special": True, "rstrip": True}}
    settings = {"extra_ids": 4, "eos_token": "</s>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.load(tmp_path)
    assert ours.sentinels() == [size + 3, size + 2, size + 1, size]
    assert ours.encode("<de> the fox <extra_id_1>") == [size + 4, *theirs.encode("the fox"), size + 2, 1]
    settings["added_tokens_decoder"] = {"7": {"content": "<new>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "'<new>'" in refusal(lambda: Tokenizer.load(tmp_path))
    for flags, ids in (({"add_bos_token": True}, [3]), ({"extra_ids": 0, "add_eos_token": False}, [])):
        data = sentencepiece_model(bos_id=3, eos_id=4)
        (tmp_path / "spiece.model").write_bytes(data)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
        assert Tokenizer.load(tmp_path).encode("") == ids


@pytest.mark.filterwarnings("ignore:Recommended")
def test_two_models_may_share_a_table_of_ids(tmp_path: Path) -> None:
    source = sentencepiece_model(vocab_size=200)
    target = sentencepiece_model(vocab_size=300)
    pieces = [piece for data in (target, source) for piece, _, _ in read_sentencepiece(data).pieces[3:]]
    table = {piece: number for number, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *pieces, "<pad>"]))}
    (tmp_path / "source.spm").write_bytes(source)
    (tmp_path / "target.spm").write_bytes(target)
    (tmp_path / "vocab.json").write_text(json.dumps(table))
    config = dict(source_lang="en", target_lang="de", model_max_length=512, tokenizer_class="MarianTokenizer")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = transformers.MarianTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    targets = Tokenizer.load(tmp_path / "target.spm")
    for text in CORPUS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert targets.encode(text) == theirs(text_target=text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 3}')
    assert "vocab.json" in refusal(lambda: Tokenizer.load(tmp_path / "target.spm"))


# tiktoken


GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
    r"""|\s+(?!\S)|\s"""
)
QWEN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ]
)


@functools.cache
def learnt_ranks() -> dict[bytes, int]:
    educational = pytest.importorskip("tiktoken._educational")
    ranks: dict[bytes, int] = educational.bpe_train("\n".join(CORPUS), 420, GPT2, visualise=None)
    return ranks


def as_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())


@pytest.mark.parametrize("name", ["small.tiktoken", "tokenizer.model"])
def test_ids_are_those_of_tiktoken(tmp_path: Path, name: str) -> None:
    tiktoken, ranks = pytest.importorskip("tiktoken"), learnt_ranks()
    (tmp_path / name).write_bytes(as_lines(ranks))
    added = {str(len(ranks)): {"content": "<|endoftext|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    theirs = tiktoken.Encoding(
        "small", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )
    ours = Tokenizer.load(tmp_path)
    assert ours.vocab_size == theirs.n_vocab
    for text in [*TEXTS, *CORPUS, "the<|endoftext|>fox"]:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special=False) == text
    ours.save(tmp_path / "copy")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")(TEXTS)["input_ids"] == ours.encode_batch(TEXTS)


@pytest.mark.parametrize(("size", "pattern"), [(66_000, CL100K), (151_000, QWEN), (200_000, O200K)])
def test_text_is_cut_as_vocabularies_of_that_size_do(size: int, pattern: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokens = (bytes(token) for length in (1, 2, 3) for token in itertools.product(range(256), repeat=length))
    ranks = {token: rank for rank, token in enumerate(itertools.islice(tokens, size))}
    theirs, ours = (
        tiktoken.Encoding("large", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}),
        tiktoken_tokenizer(ranks),
    )
    for text in [*TEXTS, *CORPUS, "I'LL we'd THEY'RE it's", "HTTPServer/Path\n\n x  \n\n", "3.14159 1234567"]:
        assert ours.encode(text).ids == theirs.encode(text), text


# Files that are wrong


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """A file with some bytes changed and perhaps its end missing; the first kilobytes hold what describes it."""
    out = bytearray(data)
    places = st.one_of(st.integers(0, len(out) - 1), st.integers(0, 400), st.integers(len(out) - 200, len(out) - 1))
    for place, value in draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)):
        out[place] = value
    return bytes(out[: draw(st.one_of(st.just(len(out)), st.integers(0, len(out))))])


@functools.cache
def intact(name: str) -> bytes:
    if name == "tiktoken":
        return as_lines(learnt_ranks())
    return sentencepiece_model(vocab_size=200, byte_fallback=False, model_type=name)


@pytest.mark.parametrize("name", ["unigram", "bpe", "tiktoken"])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: Any, name: str, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "some.model"
    path.write_bytes(data.draw(damaged(intact(name))))
    message = ""
    try:
        Tokenizer.load(path).encode_batch([*TEXTS, *CORPUS])
    except ValueError as error:
        message = str(error)
    assert not message or (str(path) in message and len(message.splitlines()) == 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 pieces for what is unknown"),
        (b"YQ== 0\n", "lacks 255 of the 256 bytes"),
        (b"YQ== 0\nYg== x\n", "line 2"),
        (b"YQ== 0\n!!!! 1\n", "line 2 is no base64"),
        (b"YQ== 0\nYQ== 1\n", "line 2"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number without end"),
        (b"\x0a\x7f<unk>", "ends within a field"),
        (b"\x80\x02some pickle", "no field of a protobuf message"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    message = refusal(lambda: Tokenizer.load(tmp_path))
    assert str(path) in message and said in message


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: Tokenizer.load(tmp_path / "none"))
    assert "holds no tokenizer" in refusal(lambda: Tokenizer.load(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refusal(lambda: Tokenizer.load(tmp_path / "tokenizer.json"))
    suffix = sentencepiece_model(treat_whitespace_as_suffix=True)
    assert "after a word" in refusal(lambda: read_sentencepiece(suffix))
    assert "model type" in refusal(lambda: read_sentencepiece(sentencepiece_model(model_type="word")))
    assert "same rank" in refusal(lambda: read_ranks(as_lines(learnt_ranks() | {b"zzz": 7})))


# What a tokenizer is asked


@pytest.mark.parametrize("kind", KINDS)
def test_words_keep_their_numbers(kind: str) -> None:
    tokenizer = trained(kind, template="<s> $0 </s>")
    words = ["Paris", "watched", "Germany", "the", "puzzles", "今天"]
    ids, numbers = tokenizer.encode_words([words])[0]
    assert ids == tokenizer.encode(" ".join(words))
    assert numbers[0] == numbers[-1] == -1
    for number, word in enumerate(words):
        pieces = [piece for piece, of in zip(ids, numbers, strict=True) if of == number]
        assert tokenizer.decode(pieces).strip().replace(" ", "") == word


@pytest.mark.parametrize("kind", KINDS)
@example(contexts=["  the first scene ", "今天 the\n\nfox"])
@given(contexts=st.lists(st.sampled_from([*CORPUS, "  the dog  ", "", "a\n b"]), max_size=4))
def test_places_are_in_the_context(kind: str, contexts: list[str]) -> None:
    tokenizer = shared(kind, template="<s> $0 </s>")
    pairs = [("where is the dog?", context) for context in contexts]
    rows = tokenizer.encode_contexts(pairs)
    assert [row[:2] for row in rows] == tokenizer.encode_pairs(pairs)
    for (_, context), (ids, types, places) in zip(pairs, rows, strict=True):
        special = tokenizer.special_ids() - {tokenizer.special("unk")}
        covered = set[int]()
        for number, kind_of, (start, end) in zip(ids, types, places, strict=True):
            assert ((start, end) == (-1, -1)) == (kind_of == 0 or number in special)
            assert context[start:end] == context[start:end].strip()
            covered.update(range(start, end))
        assert covered - {-1} == {place for place, letter in enumerate(context) if not letter.isspace()}


@pytest.mark.parametrize("kind", KINDS)
def test_word_starts_count_the_words(kind: str) -> None:
    tokenizer = shared(kind)
    starts = tokenizer.word_starts()
    assert starts.shape == (tokenizer.vocab_size,) and starts.dtype == np.bool_
    assert starts[sorted(tokenizer.special_ids())].all()
    words = ["the", "watched", "capital", "jumps", "patience", "scene"]
    begins = starts[tokenizer.encode(" ".join(words), special=False)]
    assert 1 + begins[1:].sum() == len(words)


def test_a_fingerprint_is_of_what_decides_the_ids(tmp_path: Path) -> None:
    first = trained()
    assert re.fullmatch("[0-9a-f]{64}", first.fingerprint())
    assert trained(template="$0 </s>").fingerprint() != first.fingerprint()
    assert trained(extra=["<de>"]).fingerprint() != first.fingerprint()
    first.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint() == first.fingerprint()
