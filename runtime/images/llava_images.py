"""Images of LLaVA: one square for each image, and a class token before its patches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..._core import EngineError
from ...formats.hugging_face.crop_processor import CropSettings, read_crop_settings
from ...formats.models.clip import ClipConfig
from .image_model import FloatArray, ImageModel, Tiles, check_pixels
from .patches import PatchRows
from .pixels import normalised, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKEN: Final = "<image>"


class LlavaImages(ImageModel):
    """Rules of LLaVA with CLIP's tower."""

    place = _TOKEN

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """Raises EngineError if the directory has no settings of an image processor."""
        super().__init__(directory, config, tensors)
        settings = read_crop_settings(directory)
        if settings is None:
            raise EngineError(f"{directory}: has no settings of an image processor; build the engine again")
        self._settings = settings
        self._config: ClipConfig = config
        self._patches = PatchRows(tensors["weight"], None)
        self._positions = tensors["positions"]
        self._first = tensors["first"]

    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the image's only tile."""
        return Tiles(normalised([cropped(image, self._settings, subject)], self._settings))

    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the class token's row and those of the patches, with their positions."""
        rows = np.concatenate([self._first[None], self._patches.of(pixels)])
        return np.ascontiguousarray(rows + self._positions, np.float32)

    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Returns the rows, without the class token's by default: the connector is a part of the tower's program."""
        return encoded if self._config.keeps_class else encoded[1:]

    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of rows of an image."""
        return len(tiles.pixels) * (self._config.num_positions - (not self._config.keeps_class))

    def text(self, tiles: Tiles) -> str:
        """Returns the image token for each row."""
        return _TOKEN * self.num_rows(tiles)


def cropped(image: Image, settings: CropSettings, subject: str = "image") -> Image:
    """Returns the centre of an image in mode RGB after padding and resizing.

    Raises RequestError for an image that would become larger than MAX_PIXELS.
    """
    if settings.pads:
        image = _in_square(image, settings, subject)
    size = _new_size(image.size, settings)
    if size is not None:
        check_pixels(size, subject)
        image = resized(image, size, settings)
    return image if settings.crop is None else _centre(image, settings.crop)


def _in_square(image: Image, settings: CropSettings, subject: str) -> Image:
    """Returns a square with the image in its middle and the mean's colour around it."""
    from PIL import Image as PillowImage

    width, height = image.size
    side = max(width, height)
    check_pixels((side, side), subject)
    red, green, blue = (int(value * 255) for value in settings.mean)
    made = PillowImage.new("RGB", (side, side), (red, green, blue))
    made.paste(image, ((side - width) // 2, (side - height) // 2))
    return made


def _new_size(size: tuple[int, int], settings: CropSettings) -> tuple[int, int] | None:
    """Returns (width, height) after resizing; None: the size stays."""
    if settings.size is not None:
        height, width = settings.size
        return width, height
    if settings.shortest_edge is None:
        return None
    width, height = size
    edge = settings.shortest_edge
    longer = int(edge * max(size) / min(size))
    return (edge, longer) if width <= height else (longer, edge)


def _centre(image: Image, crop: tuple[int, int]) -> Image:
    """Returns the middle (height, width) of an image; black is put around a smaller one."""
    height, width = crop
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
