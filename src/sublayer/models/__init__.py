"""The three shapes a Transformer comes in, and how one is built."""

from .build import build, derive, materialize, parse_dtype
from .decoder import Decoder
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder
from .model import Model

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "build", "derive", "materialize", "parse_dtype"]
