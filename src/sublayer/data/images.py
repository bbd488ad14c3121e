"""Pictures from files, as (channels, height, width) bytes of the size a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .readers import DataError, Row

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MAX_PIXELS = 64 << 20


def find_images(where: str | Sequence[str]) -> list[Row] | None:
    """The pictures of folders whose subfolders are the labels; None if that is not what is there."""
    folders = [Path(one) for one in ([where] if isinstance(where, str) else where)]
    if not all(folder.is_dir() for folder in folders):
        return None
    paths = [path for folder in folders for path in sorted(folder.glob("*/*")) if path.suffix.lower() in ENDINGS]
    if not paths:
        return None
    return [Row({"image": str(path), "label": path.parent.name}, str(path), 1) for path in paths]


def read_image(row: Row, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """The picture of a row: an array as it is, or a file, scaled to `shape`."""
    image: Any = row.values["image"]
    channels, height, width = shape
    if isinstance(image, np.ndarray):
        if image.shape != shape or image.dtype != np.uint8:
            raise DataError(
                f"{row.where()}: the image is {image.dtype} of shape {image.shape}; the model reads {shape}"
            )
        return image
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError("pictures from files need Pillow: pip install 'sublayer[files]'") from None
    path = Path(image) if Path(image).is_absolute() else Path(row.file).parent / image
    path = Path(image) if not path.exists() else path
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise DataError(
                    f"{row.where()}: {path} has {picture.width} x {picture.height} pixels; that is too many"
                )
            converted = picture.convert("L" if channels == 1 else "RGB").resize(
                (width, height), Image.Resampling.BILINEAR
            )
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise DataError(f"{row.where()}: {path} cannot be read as a picture: {error}") from None
    pixels = np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
