"""Parts of vision-language models that differ between families: pixels, rows before and after the tower, tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import PromptTuningConfig, RequestError
from ...formats.models.tower import TowerConfig
from .prompt import PromptImages

if TYPE_CHECKING:
    from PIL.Image import Image

FloatArray = npt.NDArray[np.float32]

MAX_PIXELS: Final = 64 << 20
"""Maximum number of pixels of an image after resizing: very narrow images may become much larger than they are."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The pixels of one image, as a tower reads them."""

    pixels: FloatArray
    """[tiles, channels, height, width]."""
    rows: int = 0
    """Number of rows of tiles before the whole image, which is the last tile; 0: there is one tile."""
    columns: int = 0


class ImageModel(ABC):
    """Rules of one family. Functions without state, which may run at the same time."""

    place: str
    """Text that the model's chat template has in place of an image."""

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """directory: of the tower's engine, with the image processor's settings.

        config: the tower's. tensors: those of formats/network/ops.py's PatchEmbedding, by the names of its fields.
        """
        self.config: Final[TowerConfig] = config

    row_interval: int = 1
    """Number of tokens of the tower from one row that rows() reads to the next."""

    @abstractmethod
    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the pixels of an image in mode RGB.

        subject: names the image in errors. Raises RequestError for an image that would become too large.
        """

    @abstractmethod
    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows [tokens, width] of the tower's prompt for a tile [channels, height, width]."""

    @abstractmethod
    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Returns a tile's rows [rows, hidden size of the language model] from the tower's output.

        encoded: [tokens / row_interval, width]. pixels: of the tile, [channels, height, width].

        projection: [outputs, inputs] of the layer outside of the program, with a request's adapter; None: there is no
        such layer.
        """

    @abstractmethod
    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of rows of the language model that an image becomes."""

    def prompt_images(self, rows: FloatArray, tiles: Sequence[Tiles]) -> PromptImages:
        """Returns the `rows` of all images of a prompt, in the form in which the language model reads them."""
        return PromptImages(PromptTuningConfig(rows), self.config.image_token_id)

    @abstractmethod
    def text(self, tiles: Tiles) -> str:
        """Returns the text that stands for an image in a prompt, with one image token for each row."""


def check_pixels(size: Sequence[int], subject: str) -> None:
    """Raises RequestError if an image (width, height) would have more than MAX_PIXELS after resizing."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"{subject} would become {width} x {height} pixels by the model's image processor; the maximum is "
            f"{MAX_PIXELS} in all"
        )
