"""Opens images that callers give: Pillow's images, arrays, files and bytes.

Sizes are checked before pixels are read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..._core import RequestError
from ...common.shown_value import shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of the accepted formats."""
_CHANNELS: Final = (1, 3, 4)
MAX_SCANS: Final = 32
"""Maximum number of scans of a JPEG file; encoders write up to 20. Each scan passes over all pixels, and may take only
a hundred bytes, so a small file with many of them would take minutes.
"""
_JPEG_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_JPEG_BEGIN, _JPEG_END, _JPEG_SCAN, _JPEG_WITHOUT_LENGTH = 0xD8, 0xD9, 0xDA, (0x01, 0xD8)


@dataclass(frozen=True)
class ImageLimits:
    """Limits of a request's images."""

    max_bytes: int = 20 << 20
    """Maximum size of a file."""
    max_pixels: int = 64 << 20
    """Maximum number of pixels of an image."""
    max_images: int = 32
    max_all_pixels: int = 256 << 20
    """Maximum number of pixels of all images together: large images of one colour are small files."""


def open_image(source: Any, subject: str, limits: ImageLimits) -> Image:
    """Returns an image in mode RGB, made from an image of Pillow, an array, a path or bytes.

    Arrays are uint8 [height, width] or [height, width, channels].

    As in transformers, files are turned as their EXIF data say, and lose transparency; Pillow's images and arrays are
    put on white. subject: names the image in errors.

    Raises RequestError for anything else, for a file that is damaged, of another format or too large, and if Pillow is
    not installed.
    """
    try:
        from PIL import Image as PillowImage
    except ModuleNotFoundError:
        raise RequestError(f"{subject}: images need Pillow: pip install 'adaptrt[vision]'") from None
    if isinstance(source, PillowImage.Image):
        _check_size(source, subject, limits)
        return _on_white(source)
    if isinstance(source, np.ndarray):
        return _on_white(_of_array(source, subject, limits))
    if isinstance(source, (str, os.PathLike)):
        source = _bytes_of(Path(source), subject, limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _of_bytes(bytes(source), subject, limits)
    raise RequestError(f"{subject} is {shown(source)}; expected an image of Pillow, an array, a path or bytes")


def digest_of(image: Image) -> str:
    """Returns the SHA-256 of the size and the pixels of an image in mode RGB, in hexadecimal digits."""
    return hashlib.sha256(f"{image.width} {image.height} ".encode() + image.tobytes()).hexdigest()


def _bytes_of(path: Path, subject: str, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise RequestError(f"{subject}: cannot read {path}: {error}") from None
    return found


def _of_bytes(data: bytes, subject: str, limits: ImageLimits) -> Image:
    from PIL import Image as PillowImage
    from PIL import ImageOps

    if len(data) > limits.max_bytes:
        raise RequestError(f"{subject} has more than {limits.max_bytes} bytes, the maximum")
    if _has_many_scans(data):
        raise RequestError(f"{subject} is a JPEG file with more than {MAX_SCANS} scans, the maximum")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and about odd metadata
            opened = PillowImage.open(io.BytesIO(data), formats=FORMATS)
            _check_size(opened, subject, limits)
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise RequestError(
            f"{subject} cannot be read as an image ({type(error).__name__}); accepted: {', '.join(FORMATS)}"
        ) from None


def _has_many_scans(data: bytes) -> bool:
    """True for a JPEG file with more than MAX_SCANS scans. Finds segments as libjpeg does."""
    if data[:2] != bytes((0xFF, _JPEG_BEGIN)):
        return False
    at, num_scans = 2, 0
    while (found := _JPEG_MARKER.search(data, at)) is not None and num_scans <= MAX_SCANS:
        at, marker = found.end(), data[found.end() - 1]
        if marker == _JPEG_END:
            break
        if marker not in _JPEG_WITHOUT_LENGTH:
            at += int.from_bytes(data[at : at + 2], "big")
        num_scans += marker == _JPEG_SCAN
    return num_scans > MAX_SCANS


def _of_array(array: np.ndarray[Any, Any], subject: str, limits: ImageLimits) -> Image:
    from PIL import Image as PillowImage

    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not is_image or 0 in array.shape:
        raise RequestError(
            f"{subject} is an array {array.dtype} {list(array.shape)}; expected uint8 [height, width] or "
            "[height, width, 1, 3 or 4]"
        )
    _check_pixels(array.shape[1], array.shape[0], subject, limits)
    return PillowImage.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _check_size(image: Image, subject: str, limits: ImageLimits) -> None:
    _check_pixels(*image.size, subject, limits)


def _check_pixels(width: int, height: int, subject: str, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise RequestError(f"{subject} is {width} x {height} pixels; expected at least one")
    if width * height > limits.max_pixels:
        raise RequestError(f"{subject} is {width} x {height} pixels; the maximum is {limits.max_pixels} in all")


def _on_white(image: Image) -> Image:
    """Returns the image in mode RGB, with white where it is transparent."""
    from PIL import Image as PillowImage

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = PillowImage.new("RGBA", image.size, (255, 255, 255, 255))
    return PillowImage.alpha_composite(background, image).convert("RGB")
