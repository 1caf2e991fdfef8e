"""Images of Mistral 3: patches of the whole image with their coordinates, and line breaks among an image's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import EngineError, RequestError
from ...formats.hugging_face.longest_edge import LongestEdgeSettings, read_longest_edge
from ...formats.models.pixtral import PixtralConfig
from .image_model import FloatArray, ImageModel, Tiles
from .patches import PatchRows
from .pixels import normalised, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKEN: Final = "[IMG]"
_BREAK: Final = "[IMG_BREAK]"
_END: Final = "[IMG_END]"
_NONE: Final = -1.0
"""A coordinate that has no value."""


class PixtralImages(ImageModel):
    """Rules of Mistral 3 with Pixtral's tower."""

    place = _TOKEN

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """Raises EngineError if the directory has no settings of an image processor."""
        super().__init__(directory, config, tensors)
        settings = read_longest_edge(directory)
        if settings is None:
            raise EngineError(f"{directory}: has no settings of an image processor; build the engine again")
        self._settings = settings
        self._config: PixtralConfig = config
        self.row_interval = config.merge_size**2
        self._patches = PatchRows(tensors["weight"], None)

    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the resized image as one tile. Raises RequestError for an image that is too narrow."""
        size = size_within(image.size, self._settings, self._config.factor, subject)
        return Tiles(normalised([resized(image, size, self._settings)], self._settings))

    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows of an image's patches, square by square, with their coordinates after them."""
        height, width = (side // self._config.patch_size for side in pixels.shape[1:])
        order, coordinates = _order(height, width, self._config.merge_size)
        return np.ascontiguousarray(np.concatenate([self._patches.of(pixels)[order], coordinates], axis=1), np.float32)

    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Returns one row for each square of patches: the connector is a part of the tower's program."""
        return encoded

    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of squares of patches."""
        height, width = self._sides(tiles)
        return height * width

    def text(self, tiles: Tiles) -> str:
        """Returns the image token for each row of the language model, and a token at the end of each line."""
        height, width = self._sides(tiles)
        return _BREAK.join([_TOKEN * width] * height) + _END

    def _sides(self, tiles: Tiles) -> tuple[int, int]:
        height, width = (side // self._config.factor for side in tiles.pixels.shape[2:])
        return height, width


def size_within(
    size: tuple[int, int], settings: LongestEdgeSettings, factor: int, subject: str = "image"
) -> tuple[int, int]:
    """Returns (width, height) after resizing: within the bounds, then rounded up to multiples of `factor`.

    Raises RequestError for an image whose shorter side would vanish.
    """
    width, height = size
    ratio = max(height / settings.height, width / settings.width)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    if width < 1 or height < 1:
        raise RequestError(
            f"{subject} is {size[0]} x {size[1]} pixels, of which none are left within {settings.width} x "
            f"{settings.height}; expected an image that is less narrow"
        )
    return -(-width // factor) * factor, -(-height // factor) * factor


@lru_cache(maxsize=16)
def _order(height: int, width: int, merge: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Returns the numbers of an image's patches in the order of the tower, and their coordinates [patches, 3]."""
    numbers = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    order = numbers.transpose(0, 2, 1, 3).reshape(-1)
    rows, columns = np.divmod(order, width)
    none = np.full(len(order), _NONE)
    return order, np.stack([rows, columns, none], axis=1).astype(np.float32)
