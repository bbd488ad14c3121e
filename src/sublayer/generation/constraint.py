"""Answers that are bound to be of a form: JSON by a schema, a regular expression, or a grammar.

A constraint tells which tokens may come next, given those of the answer so far. Grammars are followed by llguidance,
which either enforces all of a schema or says what it cannot, and bounds the work of each step.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..data import Tokenizer
from ..data.pieces import Pieces, pieces_of

# Kinds, and how many bytes each may have: the time to compile one grows with the square, its depth with the rules.
KINDS = {"json_schema": 1 << 15, "regex": 1 << 13, "grammar": 1 << 13}
KEPT, KEPT_BYTES = 64, 1 << 18  # compiled grammars of one tokenizer, and their texts together
SPACE = r"(?: |\n[ \t]{0,32})"  # between the parts of JSON; without a bound, a model may never get to the next part
FREE = '\n%llguidance {"no_forcing": true}'  # any tokens that spell the text may come, not only the usual ones
LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)  # GBNF has root ::= instead

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Stuck(ValueError):
    """No token goes on as the constraint asks."""


def constrained(tokenizer: Tokenizer, options: dict[str, Any]) -> dict[str, Any]:
    """Options of generation in which json_schema, regex or grammar have become a constraint."""
    given = {kind: options[kind] for kind in KINDS if options.get(kind) is not None}
    if len(given) + (options.get("constraint") is not None) > 1:
        raise ValueError("json_schema, regex, grammar and constraint exclude each other; give one")
    rest = {name: value for name, value in options.items() if name not in KINDS}
    for kind, value in given.items():
        rest["constraint"] = grammar_of(tokenizer, kind, value)
    return rest


def grammar_of(tokenizer: Tokenizer, kind: str, value: Any) -> Grammar:
    """A constraint of one kind; json_schema takes a schema, or True for any JSON."""
    text = _schema_text(value) if kind == "json_schema" else value
    if not isinstance(text, str):
        raise ValueError(f"{kind} is {str(value)[:100]!r}; expected a string")
    if (size := len(text.encode("utf-8", "surrogatepass"))) > KINDS[kind]:
        raise ValueError(f"{kind} has {size:,} bytes; at most {KINDS[kind]:,} are read")
    return _vocabulary(tokenizer).grammar(kind, text)


class Grammar:
    """A constraint for one vocabulary, compiled. Any number of answers may follow it at once."""

    def __init__(self, vocabulary: _Vocabulary, text: str) -> None:
        self.vocabulary = vocabulary
        self.start = vocabulary.matcher(text)
        # Where tokens say something else at the beginning of a text, what may come first is asked with those pieces.
        other = self.start.deep_copy() if vocabulary.same else vocabulary.matcher(text, first=True)
        first = vocabulary.allowed(other)
        if not first.any() and not self.start.is_accepting():
            raise Stuck("no token of the vocabulary begins an answer as it asks")
        self.first = first | vocabulary.silent

    def __call__(self, ends: Sequence[int], size: int) -> Guide:
        """What may come next in the answers of one generation, by a model of so many tokens."""
        ends = [end for end in ends if 0 <= end < size]
        if not ends:
            raise ValueError("a constrained answer must be able to end, and the model has no end token; give eos_id")
        return Guide(self, ends, size)


class Guide:
    """Follows answers token by token. States are kept by the tokens so far, so rows may be reordered as beams are."""

    def __init__(self, grammar: Grammar, ends: list[int], size: int) -> None:
        self.grammar, self.vocabulary = grammar, grammar.vocabulary
        self.ends, self.size = ends, size
        self.states: dict[tuple[int, ...], Any] = {}  # a matcher, or None where nobody reads what follows
        self.masks: dict[tuple[int, ...], Mask] = {}

    def __call__(self, rows: list[list[int]]) -> Tensor:
        """For the new tokens of each row, which may come next: (rows, V) bool."""
        keys = [tuple(row) for row in rows]
        self.states = self._go_on(list(dict.fromkeys(keys)))
        self.masks = {key: self._mask(key, state) for key, state in self.states.items()}
        return torch.from_numpy(np.stack([self.masks[key] for key in keys]))

    def _go_on(self, keys: list[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """The states after these tokens, each from the one before, or from the beginning."""
        known = {key: next((part for part in (key, key[:-1]) if part in self.states), ()) for key in keys}
        needed, states = Counter(known.values()), {}
        for key, part in known.items():
            needed[part] -= 1
            state = self.states[part] if part else self.grammar.start
            if state is not None and (not part or needed[part]):
                state = state.deep_copy()
            states[key] = self._after(state, key, len(part))
        return states

    def _after(self, state: Any, key: tuple[int, ...], done: int) -> Any:
        for place in range(done, len(key)):
            if state is None or key[place] in self.ends:
                return None
            if not state.consume_tokens(self.vocabulary.spelled(key[place], place)):
                mask = self.masks.get(key[:place])
                if mask is not None and not mask[key[place]]:
                    return None  # a beam that is out of the race, with no chance left
                raise self._stuck(key[:place], state)
        return state

    def _mask(self, key: tuple[int, ...], state: Any) -> Mask:
        out = np.zeros(self.size, np.bool_)
        if state is None:
            return ~out
        allowed = self.vocabulary.allowed(state) if key else self.grammar.first
        out[: len(allowed)] = allowed[: self.size]
        out[self.ends] = state.is_accepting()
        if not out.any():
            raise self._stuck(key, state)
        return out

    def _stuck(self, key: tuple[int, ...], state: Any) -> Stuck:
        reason = _reason(state.get_error()) if state.is_error() else "no token of the vocabulary fits"
        return Stuck(f"after {len(key)} tokens the answer cannot go on as the constraint asks: {reason}")


class _Vocabulary:
    """A tokenizer as llguidance reads it: its tokens, then an end and the 256 bytes, which no model says."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces, self.size = pieces, len(pieces.later)
        self.same = pieces.first == pieces.later
        self.later = _table(pieces.later)
        self.first = self.later if self.same else _table(pieces.first)
        self.real = np.array([bool(piece) for piece in pieces.later], np.bool_)
        self.silent = self.real & np.array([not piece for piece in pieces.first], np.bool_)
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def grammar(self, kind: str, text: str) -> Grammar:
        """Compiled, or as it was compiled before."""
        with self._lock:
            found = self._grammars.get((kind, text))
        try:
            found = found or Grammar(self, _lark(kind, text) + FREE)
        except ValueError as error:
            raise ValueError(f"{kind} cannot be followed: {error}") from None
        with self._lock:
            self._grammars[kind, text] = found
            self._grammars.move_to_end((kind, text))
            while len(self._grammars) > KEPT or sum(len(text) for _, text in self._grammars) > KEPT_BYTES:
                self._grammars.popitem(last=False)
        return found

    def matcher(self, text: str, *, first: bool = False) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        out = LLMatcher(self.first if first else self.later, text, log_level=0, limits=limits)
        if out.is_error():
            raise ValueError(_reason(out.get_error()))
        return out

    def allowed(self, state: Any) -> Mask:
        """The tokens that say something, and that may come next."""
        bits = np.frombuffer(state.compute_bitmask(), np.uint8)
        return self.real & np.unpackbits(bits, count=self.size, bitorder="little").astype(np.bool_)

    def spelled(self, token: int, place: int) -> list[int]:
        """A token as the matcher takes it: at the beginning byte by byte, where it may say less than it does later."""
        if place or self.same or token >= self.size:
            return [token]
        return [self.size + 1 + byte for byte in self.pieces.first[token]]


class _Words:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: list[bytes]) -> None:
        self.tokens = [*pieces, b"<end>", *(bytes([byte]) for byte in range(256))]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        return [self.eos_token_id + 1 + byte for byte in text.encode()]


def _table(pieces: list[bytes]) -> Any:
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ValueError("constrained output needs the package 'llguidance': pip install 'sublayer[grammar]'") from None
    words: Any = _Words(pieces)  # it takes anything with these attributes
    return LLTokenizer(words)


_VOCABULARIES: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    with _LOCK:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = _Vocabulary(pieces_of(tokenizer))
        return _VOCABULARIES[tokenizer]


def _schema_text(schema: Any) -> str:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema is {str(schema)[:100]!r}; expected a schema, or True for any JSON")
    try:
        return json.dumps(schema | {"x-guidance": {"whitespace_pattern": SPACE}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from None


def _lark(kind: str, text: str) -> str:
    """The grammar in llguidance's own language."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json_schema":
        return f"start: %json {text}"
    if kind == "regex":
        return str(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])
    if LARK.search(text):
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # it raises plain Exception for what it cannot read
        raise ValueError(_reason(str(error))) from None


def _reason(message: str) -> str:
    """One line of an error that may have several, with pictures."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it cannot be read"]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines)[0].rpartition("JSON schema: ")[2][:300]
