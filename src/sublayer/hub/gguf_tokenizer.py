"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`, and back for byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import ModelConfig, unknown
from .tensors import CheckpointError, read_json

MODELS = ("gpt2", "llama")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # llama.cpp's types of tokens
LONGEST_PIECE = 512  # characters; every way to cut a piece in two is tried

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre: how text is cut before any merging. None: as GPT-2 does; the first name of a kind is written.
_SPLITS: dict[str, list[str] | None] = {
    "gpt-2": None,
    "smollm": None,  # after cutting off every digit
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
_SAME_AS = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm", "refact": "smollm",
    "deepseek-r1-qwen": "qwen2", "phi-2": "gpt-2",
}  # fmt: skip


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("the tokenizer of a GGUF file needs the tokenizers package: pip install tokenizers") from None
    return tokenizers


# Reading


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` that cuts text as llama.cpp does with the same file."""
    library = _library()
    model = metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise CheckpointError(unknown("tokenizer.ggml.model in the GGUF file", model, MODELS))
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens, and types for {len(types)}")
    try:
        if model == "gpt2":
            tokenizer = _byte_level(library, metadata, tokens)
        else:
            tokenizer = _sentencepiece(library, metadata, tokens, types)
        for kind in (UNKNOWN, CONTROL, USER_DEFINED):
            _add(library, tokenizer, [token for token, type_ in zip(tokens, types, strict=True) if type_ == kind], kind)
        _surround(library, tokenizer, metadata, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the GGUF file's tokenizer cannot be built: {str(error).splitlines()[0]}") from None
    return tokenizer


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise CheckpointError(f"the GGUF file's tokenizer.ggml.{key} is no list of {kind.__name__}")
    return values


def _flag(metadata: dict[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if type(value) is not bool:
        raise CheckpointError(f"the GGUF file's tokenizer.ggml.{key} is {str(value)[:60]}; expected true or false")
    return value


def _ids(tokens: list[str]) -> dict[str, int]:
    """The first of two tokens that read the same is the one used."""
    return {token: len(tokens) - 1 - back for back, token in enumerate(reversed(tokens))}


def _pre(metadata: dict[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    name = _SAME_AS.get(name, name) if isinstance(name, str) else name
    if name not in _SPLITS:
        raise CheckpointError(unknown("tokenizer.ggml.pre in the GGUF file", name, [*_SPLITS, *_SAME_AS]))
    return str(name)


def _byte_level(library: Any, metadata: dict[str, Any], tokens: list[str]) -> Any:
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    for pair in merges:
        if len(pair) != 2:
            raise CheckpointError(f"the GGUF file's tokenizer.ggml.merges has {' '.join(pair)[:60]!r}; expected a pair")
    pre = _pre(metadata)
    # LLaMA 3 takes a word that is a token as it is, without looking at the merges.
    model = library.models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(library, pre)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(library: Any, name: str) -> Any:
    pre, splits = library.pre_tokenizers, _SPLITS[name]
    if splits is None:
        byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre.Sequence([pre.Digits(individual_digits=True), byte_level]) if name == "smollm" else byte_level
    parts = [pre.Split(library.Regex(split), behavior="isolated") for split in splits]
    return pre.Sequence([*parts, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(library: Any, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Any:
    """SentencePiece's BPE: two pieces may merge where the result is a piece, the best score first."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens, and scores for {len(scores)}")
    ids = _ids(tokens)
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score, type_ in zip(tokens, scores, types, strict=True):
        if type_ == NORMAL and len(token) <= LONGEST_PIECE:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    unknown_token = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    model = library.models.BPE(
        vocab=ids, merges=[merge[3:] for merge in merges], unk_token=unknown_token, fuse_unk=True, byte_fallback=True
    )
    tokenizer = library.Tokenizer(model)
    decoders, normalizers = library.decoders, library.normalizers
    spaces = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _add(library: Any, tokenizer: Any, tokens: list[str], kind: int) -> None:
    """Tokens that are found whole in a text; a user's own (4) are part of what is said, the others are not."""
    special = kind != USER_DEFINED
    added = [library.AddedToken(token, special=special, normalized=False) for token in tokens if token]
    if added:
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _surround(library: Any, tokenizer: Any, metadata: dict[str, Any], tokens: list[str]) -> None:
    """The tokens put before and after a text; left unsaid, the architecture of the tokenizer decides."""
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    first = sentencepiece or _pre(metadata) == "llama-bpe"
    template, used = ["$A"], []
    for which, default in (("bos", first), ("eos", False)):
        number = metadata.get(f"tokenizer.ggml.{which}_token_id")
        if not _flag(metadata, f"add_{which}_token", default) or number is None:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            raise CheckpointError(f"the GGUF file's {which}_token_id is {number}; it has {len(tokens)} tokens")
        template.insert(0 if which == "bos" else len(template), tokens[number])
        used.append((tokens[number], number))
    if used:
        pair = [*template, *("$B:1" if part == "$A" else f"{part}:1" for part in template)]
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=template, pair=pair, special_tokens=list(dict.fromkeys(used))
        )


# Writing


def tokenizer_to_gguf(path: Path, config: ModelConfig) -> dict[str, Any]:
    """The metadata for a tokenizer.json with byte-level BPE; the vocabulary is filled up to that of the model."""
    library = _library()
    values = read_json(path)
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    model, added = values["model"], values.get("added_tokens") or []
    if model.get("type") != "BPE" or (values.get("decoder") or {}).get("type") != "ByteLevel":
        raise CheckpointError(f"{path} is no byte-level BPE; only that kind of tokenizer can be written to GGUF")
    if (values.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        raise CheckpointError(f"{path} normalises text in a way that a GGUF file cannot say")
    ids = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    if max(ids) >= config.vocab_size:
        raise CheckpointError(f"{path} has the id {max(ids)}, outside the model's vocabulary of {config.vocab_size}")
    kinds = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in added}
    numbers = range(config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _find_pre(library, tokenizer, path),
        "tokenizer.ggml.tokens": [ids.get(number, f"[PAD{number}]") for number in numbers],
        "tokenizer.ggml.token_type": [kinds.get(number, NORMAL if number in ids else UNUSED) for number in numbers],
        "tokenizer.ggml.merges": merges,
    }
    around = tokenizer.encode("").ids  # what is put around a text
    ends = (config.eos_id,) if isinstance(config.eos_id, int) else config.eos_id or ()
    out["tokenizer.ggml.add_bos_token"] = bool(around) and around[0] == config.bos_id
    out["tokenizer.ggml.add_eos_token"] = bool(around) and around[-1] in ends[:1]
    return out


def _find_pre(library: Any, tokenizer: Any, path: Path) -> str:
    theirs = _splitting(tokenizer)
    for name in _SPLITS:
        ours = library.Tokenizer(library.models.BPE())
        ours.pre_tokenizer = pre_tokenizer(library, name)
        if _splitting(ours) == theirs:
            return name
    known = ", ".join(_SPLITS)
    raise CheckpointError(f"{path} cuts text in a way that has no name in GGUF; known here are those of {known}")


def _splitting(tokenizer: Any) -> Any:
    """What decides where text is cut: a sequence of one is that one, and offsets do not matter."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        parts = value.get("pretokenizers")
        if parts and len(parts) == 1:
            return plain(parts[0])
        return {key: plain(item) for key, item in value.items() if key != "trim_offsets"}

    return plain(json.loads(tokenizer.to_str())["pre_tokenizer"])
