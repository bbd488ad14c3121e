"""The one description of a model: every field is a choice made at one of the four seams of the core.

A configuration is frozen, checked when it is made, and goes to and from JSON. `dataclasses.replace` gives a variant;
values that follow from others (the width of a head, say) are properties, so that a variant stays consistent.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

SHAPES = ("encoder", "decoder", "encoder-decoder")
NORMS = ("layernorm", "rmsnorm", "batchnorm", "none")
PLACEMENTS = ("post", "pre", "deep", "sandwich")
POSITIONS = ("sinusoidal", "sinusoidal-block", "learned", "rotary", "relative", "alibi", "none")
ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "silu", "sigmoid")
HEADS = ("none", "lm", "mlm", "pooler", "classifier", "token-classifier", "span")
POOLERS = ("none", "tanh", "relu")
LOGITS_BIASES = ("none", "learned", "fixed")
INITS = ("xavier", "normal", "truncated", "fan-in")
SCALINGS = ("linear", "dynamic", "yarn", "llama3")


def unknown(what: str, value: object, known: tuple[str, ...] | list[str]) -> str:
    """The sentence for a name that is none of ours: what it was, the nearest known one, and all of them."""
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint} (known: {', '.join(known)})"


def _known_keys(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise ValueError(unknown(f"{cls.__name__} key", key, names))
    for spec in dataclasses.fields(cls):
        if spec.default is dataclasses.MISSING and spec.name not in values:
            raise ValueError(f"{cls.__name__} lacks {spec.name!r}; it has no default")
    return values


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary angles are stretched beyond the length a model was trained on.

    linear: positions divided by `factor`. dynamic: the base grows with the sequence (NTK). yarn: low frequencies are
    interpolated, high ones kept, cos and sin multiplied by `attention_factor`. llama3: the same idea in three bands of
    wavelength.
    """

    kind: str
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise ValueError(unknown("rotary scaling", self.kind, SCALINGS))
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number and not (value is None and name == "attention_factor"):
                raise ValueError(f"rotary scaling {name} is {value!r}; expected a finite number")
        if not isinstance(self.original_max_positions, int | None):
            raise ValueError(f"original_max_positions is {self.original_max_positions!r}; expected a whole number")
        if not self.factor >= 1.0:
            raise ValueError(f"rotary scaling factor is {self.factor}; it must be at least 1.0")
        if self.kind in ("yarn", "llama3") and not self.original_max_positions:
            raise ValueError(f"rotary scaling {self.kind!r} needs original_max_positions, the length trained on")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"llama3 scaling has high_freq_factor {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}; the first must be larger"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer, by the paper's words. `None` for a size means that it follows from the others."""

    shape: str  # "encoder", "decoder" or "encoder-decoder"
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int = 0  # 0 only where images go in
    num_encoder_layers: int = 0
    num_decoder_layers: int = 0

    # Attention
    num_kv_heads: int | None = None  # None: num_heads; 1 is multi-query, between is grouped-query
    head_dim: int | None = None  # None: d_model / num_heads
    attention_scale: float | None = None  # None: 1/√head_dim
    attention_bias: bool = True  # on the query, key and value projections
    attention_output_bias: bool = True
    qk_norm: bool = False  # RMSNorm over each head's query and key
    window: int | None = None  # a token sees this many tokens up to and including itself (each way, in an encoder)
    window_layers: tuple[int, ...] | None = None  # the layers the window applies to; None: all

    # Feed-forward
    activation: str = "relu"
    gated: bool = False
    ffn_bias: bool = True

    # Norm and residual
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    placement: str = "post"
    final_norm: bool = False

    # Positions
    positions: str = "sinusoidal"
    max_positions: int = 512
    position_offset: int = 0  # learned: rows of the table before that of position 0
    rotary_base: float = 10_000.0
    rotary_fraction: float = 1.0  # the part of each head that turns
    rotary_scaling: RotaryScaling | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128

    # Embeddings
    embedding_scale: bool = False  # tokens × √d_model
    embedding_norm: bool = False
    num_segments: int = 0
    image_size: int | None = None  # set together with patch_size: patches of an image go in, not tokens
    patch_size: int | None = None
    num_channels: int = 3
    target_vocab_size: int | None = None  # encoder-decoder with two vocabularies; None: one for both
    share_embeddings: bool = True  # encoder-decoder: source and target use one matrix

    # Head
    head: str = "none"
    tie_embeddings: bool = False  # the output matrix is the (target) token matrix
    logits_scale: float = 1.0
    logits_bias: str = "none"  # "learned" with the model, or "fixed": a stored vector that is not trained
    pooler: str = "none"  # activation of the dense layer over the first token; "none": there is no such layer
    num_labels: int = 0

    # Regularisation
    dropout: float = 0.0
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0

    # Initialisation
    init: str = "xavier"
    init_std: float = 0.02  # of "normal" and "truncated"
    init_depth_scaled: bool = False  # output projections × 1/√(residual branches)

    # Special tokens
    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None
    start_id: int | None = None  # the first token a decoder with a source is given

    def __post_init__(self) -> None:
        # JSON has lists only; frozen fields hold tuples.
        for name in ("window_layers", "eos_id"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.rotary_scaling, dict):
            scaling = RotaryScaling(**_known_keys(RotaryScaling, self.rotary_scaling))
            object.__setattr__(self, "rotary_scaling", scaling)
        _check_types(self)
        _check_choices(self)
        _check_sizes(self)
        _check_sense(self)

    # What follows from the fields

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def scale(self) -> float:
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.rotary_fraction)

    @property
    def output_vocab_size(self) -> int:
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size

    @property
    def image_input(self) -> bool:
        return self.patch_size is not None

    @property
    def num_patches(self) -> int:
        return 0 if self.image_size is None or self.patch_size is None else (self.image_size // self.patch_size) ** 2

    def windows(self, side: str) -> list[int | None]:
        """How far each layer of a side looks; None: at everything."""
        chosen = range(self.layers(side)) if self.window_layers is None else self.window_layers
        return [self.window if layer in chosen else None for layer in range(self.layers(side))]

    def layers(self, side: str) -> int:
        return self.num_encoder_layers if side == "encoder" else self.num_decoder_layers

    def deepnorm(self, side: str) -> tuple[float, float]:
        """α on the residual and β, the gain of the initialisation (Wang et al. 2022, table in figure 2)."""
        if self.placement != "deep":
            return 1.0, 1.0
        if self.shape != "encoder-decoder":
            depth = self.layers(side)
            return (2 * depth) ** 0.25, (8 * depth) ** -0.25
        encoder, decoder = self.num_encoder_layers, self.num_decoder_layers
        if side == "encoder":
            depth = encoder**4 * decoder
            return 0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)
        return (3 * decoder) ** 0.25, (12 * decoder) ** -0.25

    # JSON

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        return cls(**_known_keys(cls, values))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the model configuration is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"the model configuration must be a JSON object, not {type(values).__name__}")
        return cls.from_dict(values)


def _check_types(config: ModelConfig) -> None:
    """Fields come from other people's files: an int is an int, a flag a flag, and no number is NaN."""
    for spec in dataclasses.fields(config):
        value, annotation = getattr(config, spec.name), str(spec.type)
        if value is None and "None" in annotation:
            continue
        kinds: tuple[type, ...] = ()
        if "bool" in annotation:
            kinds = (bool,)
        elif "float" in annotation:
            kinds = (int, float)
        elif "tuple" in annotation:
            kinds = (tuple, int) if annotation.startswith("int") else (tuple,)
        elif "int" in annotation:
            kinds = (int,)
        elif annotation == "str":
            kinds = (str,)
        elif "RotaryScaling" in annotation:
            kinds = (RotaryScaling,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{spec.name} is {value!r}; expected {annotation}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{spec.name} is {value}; expected a finite number")
        if isinstance(value, tuple) and not all(type(item) is int for item in value):
            raise ValueError(f"{spec.name} is {value!r}; expected whole numbers only")


def _check_choices(config: ModelConfig) -> None:
    for name, known in (
        ("shape", SHAPES),
        ("norm", NORMS),
        ("placement", PLACEMENTS),
        ("positions", POSITIONS),
        ("activation", ACTIVATIONS),
        ("head", HEADS),
        ("pooler", POOLERS),
        ("logits_bias", LOGITS_BIASES),
        ("init", INITS),
    ):
        if getattr(config, name) not in known:
            raise ValueError(unknown(name, getattr(config, name), known))


def _check_sizes(config: ModelConfig) -> None:
    for name in ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "max_positions", "window"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name in ("dropout", "attention_dropout", "ffn_dropout"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0 and below 1")
    for name in ("vocab_size", "num_segments", "position_offset", "num_labels"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must not be negative")
    if not 0.0 < config.rotary_fraction <= 1.0:
        raise ValueError(f"rotary_fraction is {config.rotary_fraction}; it must be above 0 and at most 1")
    if config.norm_eps < 0 or config.rotary_base <= 0 or config.init_std <= 0:
        raise ValueError("norm_eps must not be negative; rotary_base and init_std must be above 0")
    if config.head_dim is None and config.d_model % config.num_heads:
        raise ValueError(
            f"num_heads {config.num_heads} does not divide d_model {config.d_model}; "
            "choose heads that divide it, or set head_dim"
        )
    if config.num_heads % config.kv_heads:
        raise ValueError(
            f"num_kv_heads {config.kv_heads} does not divide num_heads {config.num_heads}; "
            "every group of query heads shares one key and value head"
        )
    for side in ("encoder", "decoder"):
        needed, layers = side in config.shape.split("-"), config.layers(side)
        if needed and layers < 1:
            raise ValueError(f"num_{side}_layers is {layers}; shape {config.shape!r} needs at least 1")
        if not needed and layers:
            raise ValueError(f"num_{side}_layers is {layers}, but shape {config.shape!r} has no {side}; set it to 0")


def _check_sense(config: ModelConfig) -> None:
    """Combinations that mean nothing, each refused with its reason."""
    if config.positions == "rotary" and (config.rotary_dim < 2 or config.rotary_dim % 2):
        raise ValueError(
            f"rotary positions turn pairs of dimensions, and {config.rotary_dim} of head_dim {config.head_size} "
            f"(rotary_fraction {config.rotary_fraction}) is not an even number of at least 2; change one of them"
        )
    dynamic = config.rotary_scaling is not None and config.rotary_scaling.kind == "dynamic"
    if config.positions == "rotary" and dynamic and config.rotary_dim < 4:
        raise ValueError(f"dynamic rotary scaling needs at least 4 rotary dimensions, not {config.rotary_dim}")
    if config.positions.startswith("sinusoidal") and config.d_model % 2:
        raise ValueError(f"sinusoidal positions come in sine-cosine pairs; d_model {config.d_model} is odd")
    if config.positions == "relative" and (
        config.relative_buckets < 4
        or config.relative_buckets % 2
        or config.relative_max_distance <= config.relative_buckets // 2
    ):
        raise ValueError(
            f"relative_buckets is {config.relative_buckets} and relative_max_distance {config.relative_max_distance}; "
            "expected an even number of at least 4, and a distance above half of it"
        )
    if (config.image_size is None) != (config.patch_size is None):
        raise ValueError("image_size and patch_size go together: set both for images, neither for tokens")
    if config.image_size is not None and config.patch_size is not None:
        if config.shape != "encoder":
            raise ValueError(f"patches of an image have no next token; shape must be 'encoder', not {config.shape!r}")
        if config.patch_size < 1 or config.image_size % config.patch_size:
            raise ValueError(
                f"patch_size {config.patch_size} does not divide image_size {config.image_size}; "
                "the image must be cut into whole patches"
            )
        if config.head in ("lm", "mlm"):
            raise ValueError(f"head {config.head!r} predicts tokens, and this model reads images; use 'classifier'")
    elif config.vocab_size < 1:
        raise ValueError(f"vocab_size is {config.vocab_size}; a model that reads tokens needs at least 1")
    _check_head(config)


def _check_head(config: ModelConfig) -> None:
    encoder_heads = ("mlm", "pooler", "classifier", "token-classifier", "span")
    if config.shape == "encoder" and config.head == "lm":
        raise ValueError("an encoder sees the token it would predict; use head 'mlm', or shape 'decoder' for 'lm'")
    if config.shape != "encoder" and config.head in encoder_heads:
        raise ValueError(f"head {config.head!r} reads an encoder's output; shape {config.shape!r} has 'lm' or 'none'")
    if config.head in ("classifier", "token-classifier") and config.num_labels < 1:
        raise ValueError(f"head {config.head!r} needs num_labels of at least 1, not {config.num_labels}")
    if config.pooler != "none" and config.head not in ("none", "pooler", "classifier"):
        raise ValueError(
            f"a pooler feeds head 'none', 'pooler' or 'classifier', and head {config.head!r} would not read it; "
            "set pooler='none'"
        )
    if config.pooler != "none" and config.shape != "encoder":
        raise ValueError(f"a pooler reads the first token of an encoder; shape {config.shape!r} has none to read")
    if config.head == "pooler" and config.pooler == "none":
        raise ValueError("head 'pooler' needs a pooler activation: set pooler='tanh'")
    if config.target_vocab_size is not None:
        if config.shape != "encoder-decoder":
            raise ValueError(f"target_vocab_size is for shape 'encoder-decoder', not {config.shape!r}")
        if config.share_embeddings:
            raise ValueError("two vocabularies cannot share one matrix; set share_embeddings=False")
    if config.window_layers is not None:
        deepest = max(config.num_encoder_layers, config.num_decoder_layers)
        if config.window is None or any(not 0 <= layer < deepest for layer in config.window_layers):
            raise ValueError(
                f"window_layers is {config.window_layers}; it needs a window, and layers from 0 to {deepest - 1}"
            )
