"""Images of Gemma 3: squares of the image and of its crops, whose neighbouring rows are averaged and projected."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..._core import EngineError
from ...formats.hugging_face.pan_and_scan import PanAndScanSettings, read_pan_and_scan
from ...formats.models.gemma3_tower import Gemma3TowerConfig
from .image_model import FloatArray, ImageModel, Tiles
from .patches import PatchRows
from .pixels import normalised, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGIN: Final = "<start_of_image>"
_TOKEN: Final = "<image_soft_token>"
_END: Final = "<end_of_image>"
_NUMBERS: Final = 1 << 22
"""Numbers of images are below it."""
_NONE: Final = -1.0
"""A coordinate that has no value."""


class Gemma3Images(ImageModel):
    """Rules of Gemma 3."""

    place = _BEGIN

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """Raises EngineError if the directory has no settings of an image processor."""
        super().__init__(directory, config, tensors)
        settings = read_pan_and_scan(directory)
        if settings is None:
            raise EngineError(f"{directory}: has no settings of an image processor; build the engine again")
        self._settings = settings
        self._config: Gemma3TowerConfig = config
        self._patches = PatchRows(tensors["weight"], tensors["bias"])
        self._positions = tensors["positions"]
        self._norm = tensors["pooled_norm"]
        self._projection = tensors["pooled_projection"]

    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the square of an image, and those of its crops."""
        side = (self._settings.side, self._settings.side)
        images = [image, *crops_of(image, self._settings)]
        return Tiles(normalised([resized(one, side, self._settings) for one in images], self._settings))

    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows of a square's patches, with their positions."""
        return np.ascontiguousarray(self._patches.of(pixels) + self._positions, np.float32)

    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Averages squares of rows, normalises and projects them.

        After a row's elements follow a number, by which the rows of an image attend to each other, and a coordinate
        without a value. The number depends on the pixels, so that prefixes are shared by whole images.
        """
        c = self._config
        small, pool = c.patches_per_side // c.pool_size, c.pool_size
        squares = encoded.reshape(small, pool, small, pool, -1).mean(axis=(1, 3), dtype=np.float32)
        pooled = squares.reshape(small * small, -1)
        scale = 1.0 / np.sqrt(np.mean(pooled * pooled, axis=1, keepdims=True) + np.float32(c.norm_epsilon))
        made = (pooled * scale * self._norm) @ self._projection
        number = int.from_bytes(hashlib.sha256(pixels.tobytes()).digest()[:4], "big") % _NUMBERS
        columns = np.broadcast_to(np.array([number, _NONE], np.float32), (len(made), 2))
        return np.ascontiguousarray(np.concatenate([made, columns], axis=1), np.float32)

    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of rows of all squares."""
        return len(tiles.pixels) * self._config.rows_per_image

    def text(self, tiles: Tiles) -> str:
        """Returns the tokens of an image, and those of its crops after it, with transformers' words around them."""
        square = f"\n\n{_BEGIN}{_TOKEN * self._config.rows_per_image}{_END}\n\n"
        num_crops = len(tiles.pixels) - 1
        if num_crops == 0:
            return square
        crops = " ".join([square] * num_crops)
        return f"Here is the original image {square} and here are some crops to help you see better {crops}"


def crops_of(image: Image, settings: PanAndScanSettings) -> list[Image]:
    """Returns the crops along the longer side of an image; none for an image that is not much longer than wide."""
    width, height = image.size
    longer, shorter = max(width, height), min(width, height)
    if not settings.crops or longer / shorter < settings.min_ratio:
        return []
    count = min(longer // settings.min_crop_size, math.floor(longer / shorter + 0.5))
    count = min(settings.max_num_crops, max(2, count))
    length = math.ceil(longer / count)
    if min(length, shorter) < settings.min_crop_size:
        return []
    found = []
    for number in range(count):
        first, last = number * length, min((number + 1) * length, longer)
        box = (first, 0, last, height) if width >= height else (0, first, width, last)
        found.append(image.crop(box))
    return found
