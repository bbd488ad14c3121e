"""The three shapes a Transformer comes in, and how one is built."""

from .build import build, collector_paused, derive, materialize, parse_dtype
from .decoder import Decoder
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder
from .model import Model

__all__ = [
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Model",
    "build",
    "collector_paused",
    "derive",
    "materialize",
    "parse_dtype",
]
