"""Cuts an image into the square tiles that a vision tower reads, with the pixels of transformers' Pillow processors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ...formats.hugging_face.image_processor import TileSettings
from .image_model import Tiles, check_pixels
from .pixels import normalised, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SIDE: Final = 4096
"""transformers' limit of an image's longer side."""


def cut_tiles(image: Image, settings: TileSettings, subject: str = "image") -> Tiles:
    """Returns the tiles of an image in mode RGB.

    Raises RequestError for an image that would become larger than MAX_PIXELS.
    """
    size = settings.tile_size
    if settings.longest_edge is not None:
        image = resized(image, _with_longer_side(image.size, settings.longest_edge), settings)
    if not settings.splits:
        return Tiles(normalised([resized(image, (size, size), settings)], settings), 0, 0)
    whole_tiles = _in_whole_tiles(image.size, size)
    check_pixels(whole_tiles, subject)
    image = resized(image, whole_tiles, settings)
    columns, rows = (side // size for side in image.size)
    if (columns, rows) == (1, 1):
        return Tiles(normalised([image], settings), 0, 0)
    boxes = [(x * size, y * size, (x + 1) * size, (y + 1) * size) for y in range(rows) for x in range(columns)]
    whole = resized(image, (size, size), settings)
    return Tiles(normalised([*(image.crop(box) for box in boxes), whole], settings), rows, columns)


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
