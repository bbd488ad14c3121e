"""What a recipe says about its data and its tokenizer. Every key has a default."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import unknown

OBJECTIVES = (
    "sequence-to-sequence", "causal", "masked", "span-corruption", "denoising",
    "classify-sequence", "classify-tokens", "find-span", "classify-image", "prompt-completion", "chat",
)  # fmt: skip
CORPORA = ("cldr", "stdlib", "digits", "labelled", "tagged", "questions")
DOCUMENTS = ("file", "paragraph", "line")
LAYOUTS = ("auto", "padded", "packed")
ROLES = ("pad", "eos", "bos", "unk", "cls", "sep", "mask")
TOKENIZERS = ("bpe", "unigram", "wordpiece")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    objective: str = "causal"
    # Where the rows are: files, globs, folders, or "datasets:NAME[:CONFIG]". None: the built-in corpus.
    train: str | tuple[str, ...] | None = None
    valid: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None
    split: float = 0.0  # of the training rows, held out to validate with; which ones follows from split_seed
    split_seed: int = 0
    corpus: str | None = None
    corpus_size: int = 20_000  # rows of a corpus that is made on the spot
    # The columns of the files that hold each part of an example, by name.
    source: str = "source"
    target: str = "target"
    text: str = "text"
    pair: str | None = None  # classify-sequence: the column of a second text
    label: str = "label"
    words: str = "words"
    tags: str = "tags"
    question: str = "question"
    context: str = "context"
    answer: str = "answer"
    image: str = "image"
    prompt: str = "prompt"
    completion: str = "completion"
    input: str | None = None  # prompt-completion, sequence-to-sequence: the column of what stands under the prompt
    between: str = ""  # prompt-completion: what stands between the two
    as_chat: bool = False  # prompt-completion: as turns of user and assistant, by the checkpoint's chat template
    messages: str = "messages"
    names: tuple[str, ...] | None = None  # of the columns, for a file without a header
    documents: str = "file"  # what one document is in a plain text file
    on_error: str = "stop"  # a bad row stops the run, or is skipped and counted
    max_row_bytes: int = 8 << 20
    max_length: int = 256  # tokens of an example, each side; what is longer is cut
    group_by_length: bool = True
    layout: str = "auto"  # packed where the device has attention for it, else padded
    mask_probability: float = 0.15
    whole_words: bool = False
    noise_density: float = 0.15  # span-corruption
    noise_ratio: float = 0.3  # denoising
    mean_span: float = 3.0
    permute_sentences: bool = True  # denoising
    flip: bool = False  # images: mirrored half of the time
    crop: int = 0  # images: shifted by up to this many pixels
    cache: str | None = None  # the folder of tokenised data; None: the user's cache folder

    def __post_init__(self) -> None:
        for name, known in (
            ("objective", OBJECTIVES), ("documents", DOCUMENTS), ("layout", LAYOUTS), ("on_error", ("stop", "skip")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(unknown(f"data.{name}", getattr(self, name), known))
        if self.corpus is not None and self.corpus not in CORPORA:
            raise ValueError(unknown("data.corpus", self.corpus, CORPORA))
        for name, least in (("max_length", 2), ("corpus_size", 100), ("max_row_bytes", 1), ("crop", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("mask_probability", "noise_density", "noise_ratio"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be between 0 and 1")
        if not 0.0 <= self.split < 1.0:
            raise ValueError(f"data.split is {self.split}; it must be from 0 to below 1, such as 0.2")
        if self.split and self.valid is not None:
            raise ValueError("data.split and data.valid both say what to validate with; give one of them")
        if self.mean_span < 1.0:
            raise ValueError(f"data.mean_span is {self.mean_span}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    path: str | None = None  # a tokenizer to use as it is; None: one is trained on the training data
    kind: str = "bpe"
    vocab_size: int = 8000
    # What the special tokens are called, by their role; an empty name leaves the role out.
    pad: str = "<pad>"
    bos: str = ""
    eos: str = "</s>"
    unk: str = ""
    mask: str = ""
    cls: str = ""
    sep: str = ""
    extra: tuple[str, ...] = ()
    start: str = "pad"  # the special token, by its role, that a decoder with a source is given first
    sentinels: int = 0  # T5's <extra_id_0>, <extra_id_1>, …
    template: str = "$0"  # what stands around a text: "$0 </s>", "[CLS] $0 [SEP]"
    lowercase: bool = False
    digits: bool = False  # every digit a token of its own

    def __post_init__(self) -> None:
        if self.kind not in TOKENIZERS:
            raise ValueError(unknown("tokenizer.kind", self.kind, TOKENIZERS))
        if self.vocab_size < 1:
            raise ValueError(f"tokenizer.vocab_size is {self.vocab_size}; it must be at least 1")
        if self.start not in ROLES:
            raise ValueError(unknown("tokenizer.start", self.start, ROLES))

    @property
    def special(self) -> dict[str, str]:
        return {role: getattr(self, role) for role in ROLES if getattr(self, role)}

    @property
    def all_extra(self) -> tuple[str, ...]:
        return (*self.extra, *(f"<extra_id_{n}>" for n in range(self.sentinels)))
