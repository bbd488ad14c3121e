"""Vocabularies learnt from text, through the `tokenizers` library; the same texts give the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..config import unknown
from .settings import ROLES
from .tokenizer import Tokenizer
from .tokenizer_files import guards, piece_decoder

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    *,
    kind: str = "bpe",
    vocab_size: int = 8000,
    special: Mapping[str, str],
    template: str = "$0",
    lowercase: bool = False,
    digits: bool = False,
    extra: Sequence[str] = (),
    progress: bool = False,
) -> Tokenizer:
    """A vocabulary of at most `vocab_size` tokens, learnt from texts or from lists of texts.

    bpe: of bytes, as GPT-2; every text comes back as it was. unigram: as SentencePiece; what no piece covers is the
    `unk` token, or bytes where there is none. wordpiece: as BERT; it needs an `unk` token.

    `special` maps a role (pad, eos …) to its token; these get the first ids, in the order given, and those of `extra`
    the next. An `extra` token takes the space after it, so that a text reads the same behind it as alone. `template`
    says what is put around a text, "[CLS] $0 [SEP]" say; for a pair of texts, what follows $0 follows the second too.
    `digits` makes every digit a token of its own, so that numbers are read alike whatever their length.
    """
    learn = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}
    if kind not in learn:
        raise ValueError(unknown("kind of tokenizer", kind, list(learn)))
    tokens = _check_special(special, extra)
    before, after = _around(template, tokens)
    if kind == "wordpiece" and "unk" not in special:
        raise ValueError("a wordpiece vocabulary needs an 'unk' token in special, for words it cannot write")
    backend = _pipeline(kind, lowercase, tokens)
    if digits:
        if kind == "wordpiece":
            raise ValueError("digits is for bpe and unigram; a wordpiece tokenizer would put spaces between them")
        apart = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, apart])
    lesson = _Lesson(backend, _checked(texts), tokens, special.get("unk"), vocab_size, progress)
    backend.model = learn[kind](lesson)
    added = [
        AddedToken(token, special=True, normalized=False, lstrip=token == special.get("mask"), rstrip=token in extra)
        for token in tokens
    ]
    backend.add_special_tokens(added)
    pair = [*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)]
    used = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
    backend.post_processor = processors.TemplateProcessing([*before, "$A", *after], pair, used)
    settings = {f"{role}_token": token for role, token in special.items()}
    return Tokenizer(backend, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _check_special(special: Mapping[str, str], extra: Sequence[str]) -> list[str]:
    for role in special:
        if role not in ROLES:
            raise ValueError(unknown("role of a special token", role, ROLES))
    if isinstance(extra, str):
        raise ValueError(f"extra is the text {extra!r}; expected a list of tokens")
    tokens = list(dict.fromkeys(special.values()))  # one token may have two roles
    for token in (*tokens, *extra):
        if not isinstance(token, str) or not token.strip() or token != token.strip():
            raise ValueError(f"the special token {token!r} is empty, or has spaces around it")
    for token in extra:
        if token in tokens:
            raise ValueError(f"the special token {token!r} is given twice")
        tokens.append(token)
    return tokens


def _checked(texts: Iterable[str] | Iterable[list[str]]) -> Iterator[Any]:
    """The texts as they are, once it is known that they are texts and that there are some."""
    if isinstance(texts, str):
        raise ValueError("texts is one text; expected a list of them, or of lists of them")
    empty = True
    for number, item in enumerate(texts):
        batch: list[Any] = item if isinstance(item, list) else [item]
        for text in batch:
            if not isinstance(text, str):
                raise ValueError(f"text {number} is of type {type(text).__name__}; expected a text, or a list of texts")
        empty = empty and not any(text.strip() for text in batch)
        yield item
    if empty:
        raise ValueError("there is no text to learn a vocabulary from; give at least one that is not empty")


def _pipeline(kind: str, lowercase: bool, special: Sequence[str]) -> tokenizers.Tokenizer:
    """What happens to a text around the vocabulary, which is still missing."""
    out = tokenizers.Tokenizer(models.BPE())
    if kind == "bpe":
        if lowercase:
            out.normalizer = normalizers.Lowercase()
        out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        out.decoder = decoders.ByteLevel()
    elif kind == "wordpiece":
        out.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        out.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        out.decoder = decoders.WordPiece("##")
    else:
        steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(r"\A\s+|\s+\z"), "")]
        steps += [normalizers.Replace(Regex(" {2,}"), " "), *([normalizers.Lowercase()] if lowercase else [])]
        out.normalizer = normalizers.Sequence(steps)
        words = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
        out.pre_tokenizer = pre_tokenizers.Sequence([words, *guards((*special, *BYTES))])
        out.decoder = piece_decoder()
    return out


def _around(template: str, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The tokens before and after the text."""
    parts = template.split()
    if parts.count("$0") != 1:
        raise ValueError(f"the template {template!r} must hold $0, the text, once")
    for part in parts:
        if part != "$0" and part not in tokens:
            raise ValueError(unknown(f"token in the template {template!r}", part, list(tokens)))
    middle = parts.index("$0")
    return parts[:middle], parts[middle + 1 :]


@dataclass(frozen=True)
class _Lesson:
    """What a vocabulary is learnt from; the model that comes of it has the special tokens as its first ids."""

    backend: tokenizers.Tokenizer
    texts: Iterable[Any]
    special: list[str]
    unk: str | None
    size: int
    progress: bool

    def scratch(self, model: models.Model) -> tokenizers.Tokenizer:
        """A tokenizer to learn in, since a trainer leaves special tokens of its own in it."""
        out = tokenizers.Tokenizer.from_str(self.backend.to_str())
        out.model = model
        return out

    def need(self, smallest: int, what: str) -> None:
        if self.size < smallest:
            special = f"{len(self.special)} special tokens"
            raise ValueError(f"vocab_size is {self.size}; {special} and {what} need at least {smallest}")


def _bpe(lesson: _Lesson) -> models.Model:
    lesson.need(len(lesson.special) + 256, "256 bytes")
    trainer = trainers.BpeTrainer(
        vocab_size=lesson.size,
        min_frequency=2,
        show_progress=lesson.progress,
        special_tokens=lesson.special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    scratch = lesson.scratch(models.BPE())
    scratch.train_from_iterator(lesson.texts, trainer)
    return scratch.model


def _wordpiece(lesson: _Lesson) -> models.Model:
    """Learnt twice: the trainer numbers the letters inside a word by chance, and breaks ties by these numbers."""
    texts, unk = list(lesson.texts), str(lesson.unk)
    scratch = lesson.scratch(models.WordPiece(unk_token=unk))
    scratch.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=0, show_progress=False))
    first = list(dict.fromkeys([*lesson.special, *sorted(scratch.get_vocab())]))
    lesson.need(len(first), "the letters in the texts, at the start of a word and within,")
    trainer = trainers.WordPieceTrainer(
        vocab_size=lesson.size, min_frequency=2, show_progress=lesson.progress, special_tokens=first
    )
    scratch.train_from_iterator(texts, trainer)
    return models.WordPiece(scratch.get_vocab(), unk_token=unk)


def _unigram(lesson: _Lesson) -> models.Model:
    texts = list(lesson.texts)
    scratch = lesson.scratch(models.BPE())
    scratch.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=0, show_progress=False))
    first = lesson.special if lesson.unk is not None else [*lesson.special, *BYTES]
    letters = set(scratch.get_vocab()) - set(first)
    without = "" if lesson.unk is not None else "256 bytes (there is no 'unk' token) and "
    lesson.need(len(first) + len(letters), f"{without}the {len(letters)} letters in the texts")
    wanted = lesson.size - len(first)
    # Asked for hardly more than the letters, the trainer never ends; so it is asked for more, and what it gives is cut.
    more = max(wanted, len(letters)) * 11 // 10 + 2
    trainer = trainers.UnigramTrainer(vocab_size=more, show_progress=lesson.progress)
    scratch = lesson.scratch(models.Unigram())
    scratch.train_from_iterator(texts, trainer)
    learnt = _settled(json.loads(scratch.to_str())["model"]["vocab"])
    longer = [piece for piece, _ in learnt if len(piece) > 1 and piece not in first][: wanted - len(letters)]
    kept = letters.union(longer)
    pieces = [*((token, 0.0) for token in first), *((piece, score) for piece, score in learnt if piece in kept)]
    number = first.index(BYTES[0] if lesson.unk is None else lesson.unk)
    return models.Unigram(pieces, unk_id=number, byte_fallback=lesson.unk is None)


def _settled(pieces: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """The pieces without what chance adds, the likeliest first.

    Sums are taken in any order, which moves the last digits; and letters that the trainer had dropped come back in any
    order, each 0.0001 above the last, starting from the lowest score.
    """
    scores = dict(pieces)
    lowest = min(scores.values())

    def settle(piece: str, score: float) -> float:
        steps = (score - lowest) * 1e4
        came_back = len(piece) == 1 and steps < len(scores) and abs(steps - round(steps)) < 1e-6
        return round(lowest if came_back else score, 6)

    settled = {piece: settle(piece, score) for piece, score in scores.items()}
    return sorted(settled.items(), key=lambda item: (-item[1], item[0]))
