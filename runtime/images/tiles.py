"""Cuts an image into the square tiles that a vision tower reads, with the pixels of transformers' Pillow processors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...formats.hugging_face.image_processor import TileSettings

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SIDE: Final = 4096
"""transformers' limit of an image's longer side."""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one image."""

    pixels: FloatArray
    """[tiles, channels, tile_size, tile_size], row by row; the last tile is the whole image."""
    rows: int
    """Number of rows of tiles before the whole image; 0: the whole image is the only tile."""
    columns: int


def cut_tiles(image: Image, settings: TileSettings) -> Tiles:
    """Returns the tiles of an image in mode RGB."""
    size = settings.tile_size
    if settings.longest_edge is not None:
        image = _resized(image, _with_longer_side(image.size, settings.longest_edge), settings)
    if not settings.splits:
        return Tiles(_normalised([_resized(image, (size, size), settings)], settings), 0, 0)
    image = _resized(image, _in_whole_tiles(image.size, size), settings)
    columns, rows = (side // size for side in image.size)
    if (columns, rows) == (1, 1):
        return Tiles(_normalised([image], settings), 0, 0)
    boxes = [(x * size, y * size, (x + 1) * size, (y + 1) * size) for y in range(rows) for x in range(columns)]
    whole = _resized(image, (size, size), settings)
    return Tiles(_normalised([*(image.crop(box) for box in boxes), whole], settings), rows, columns)


def _with_longer_side(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Returns (width, height) with the longer side `longest` and an even shorter side, within transformers' limit."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
    return max(width, 1), max(height, 1)


def _in_whole_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """Returns (width, height) in whole tiles, the longer side first and the other by the ratio of the sides."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height


def _resized(image: Image, size: tuple[int, int], settings: TileSettings) -> Image:
    from PIL.Image import Resampling

    return image.resize(size, Resampling(settings.resample))


def _normalised(tiles: list[Image], settings: TileSettings) -> FloatArray:
    """Returns (pixels * rescale_factor - mean) / std, rounded where transformers rounds."""
    pixels = np.stack([np.asarray(tile) for tile in tiles]).transpose(0, 3, 1, 2)
    rescaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
    return np.ascontiguousarray((rescaled - mean) / std)
