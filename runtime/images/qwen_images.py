"""Images of Qwen2-VL and its successors: patches of the whole image, with coordinates for tower and language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import EngineError, PromptTuningConfig, RequestError
from ...formats.hugging_face.patch_processor import MAX_RATIO, PatchSettings, read_patch_settings
from ...formats.models.qwen_tower import QwenTowerConfig
from .image_model import FloatArray, ImageModel, Tiles
from .pixels import normalised, resized
from .prompt import PromptImages, VirtualPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

IntArray = npt.NDArray[np.int64]

_TOKEN: Final = "<|image_pad|>"
_NONE: Final = -1.0
"""A coordinate that has no value."""


@dataclass(frozen=True, eq=False)
class _PlacedImages(PromptImages):
    """Rows whose positions depend on the tokens before them."""

    sides: tuple[tuple[int, int], ...]
    """(height, width) of each image in rows."""

    def within(self, prompt: Sequence[int], vocab_size: int) -> VirtualPrompt:
        """Returns the prompt with the numbers of rows that have their positions in this prompt."""
        rows = with_positions(self.rows.embedding_table, np.asarray(prompt), self.image_token_id, self.sides)
        placed = PromptImages(PromptTuningConfig(rows), self.image_token_id, digests=self.digests)
        return placed.within(prompt, vocab_size)


class QwenImages(ImageModel):
    """Rules of Qwen2-VL and its successors."""

    place = _TOKEN

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """Raises EngineError if the directory has no settings of an image processor."""
        super().__init__(directory, config, tensors)
        settings = read_patch_settings(directory)
        if settings is None:
            raise EngineError(f"{directory}: has no settings of an image processor; build the engine again")
        self._settings = settings
        self._config: QwenTowerConfig = config
        self.row_interval = config.merge_size**2
        weight = tensors["weight"]
        # All frames of an image are equal, so that the convolution's weights of a pixel can be added up.
        self._weight = np.ascontiguousarray(weight.sum(axis=2).reshape(len(weight), -1).T)
        self._bias = tensors.get("bias")
        self._positions = tensors.get("positions")

    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the resized image as one tile. Raises RequestError for an image that is too narrow."""
        size = smart_size(image.size, self._settings, subject)
        return Tiles(normalised([resized(image, size, self._settings)], self._settings))

    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows of an image's patches, window by window, with their coordinates after them."""
        size, merge = self._config.patch_size, self._config.merge_size
        height, width = (side // size for side in pixels.shape[1:])
        cut = pixels.reshape(len(pixels), height, size, width, size).transpose(1, 3, 0, 2, 4)
        grid = _grid(height, width, merge, self._window_rows)
        rows = cut.reshape(height * width, -1)[grid.patches] @ self._weight
        if self._bias is not None:
            rows = rows + self._bias
        if self._positions is not None:
            rows = rows + _interpolated(self._positions, self._config.positions_per_side, height, width)[grid.patches]
        return np.ascontiguousarray(np.concatenate([rows, grid.coordinates], axis=1), np.float32)

    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Returns one row for each square of patches, row by row: the mergers are a part of the tower's program."""
        merge = self._config.merge_size
        height, width = (side // self._config.patch_size for side in pixels.shape[1:])
        grid = _grid(height, width, merge, self._window_rows)
        made: FloatArray = np.empty((len(grid.squares), encoded.shape[1]), np.float32)
        made[grid.squares] = encoded
        return made

    @property
    def _window_rows(self) -> int:
        return self._config.window_rows if self._config.has_windows else 0

    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of squares of patches."""
        height, width = self.sides(tiles)
        return height * width

    def sides(self, tiles: Tiles) -> tuple[int, int]:
        """Returns (height, width) of the image in rows of the language model."""
        height, width = (side // self._settings.factor for side in tiles.pixels.shape[2:])
        return height, width

    def text(self, tiles: Tiles) -> str:
        """Returns the image token for each row."""
        return _TOKEN * self.num_rows(tiles)

    def prompt_images(self, rows: FloatArray, tiles: Sequence[Tiles]) -> PromptImages:
        """Returns rows that get their positions when the prompt is complete."""
        sides = tuple(self.sides(one) for one in tiles)
        return _PlacedImages(PromptTuningConfig(rows), self._config.image_token_id, sides)


def smart_size(size: tuple[int, int], settings: PatchSettings, subject: str) -> tuple[int, int]:
    """Returns (width, height) after resizing: whole squares of patches, within the bounds, about as wide as high.

    Raises RequestError for an image whose sides differ too much.
    """
    width, height = size
    factor = settings.factor
    if max(size) / min(size) > MAX_RATIO:
        raise RequestError(
            f"{subject} is {width} x {height} pixels; expected a side up to {MAX_RATIO} times as long as the other"
        )
    made = round(width / factor) * factor, round(height / factor) * factor
    if made[0] * made[1] > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        made = (
            max(factor, math.floor(width / shrink / factor) * factor),
            max(factor, math.floor(height / shrink / factor) * factor),
        )
    elif made[0] * made[1] < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        made = math.ceil(width * grow / factor) * factor, math.ceil(height * grow / factor) * factor
    return made


class _Grid:
    """The order of an image's patches in the tower: squares of patches, window by window."""

    def __init__(self, height: int, width: int, merge: int, window: int) -> None:
        """height, width: of the image in patches. window: height and width of windows in squares; 0: no windows."""
        down, across = height // merge, width // merge
        row, column = np.divmod(np.arange(down * across), across)
        side = window or max(down, across)
        windows = (row // side) * -(-across // side) + column // side
        self.squares: Final[IntArray] = np.lexsort((column, row, windows))
        """[squares] numbers of the squares, row by row in the image, in the tower's order."""
        inner_row, inner_column = (values[None] for values in np.divmod(np.arange(merge * merge), merge))
        rows = (row[self.squares, None] * merge + inner_row).reshape(-1)
        columns = (column[self.squares, None] * merge + inner_column).reshape(-1)
        self.patches: Final[IntArray] = rows * width + columns
        """[patches] numbers of the patches, row by row in the image, in the tower's order."""
        of_patches = np.repeat(windows[self.squares], merge * merge)
        none = np.full(len(rows), _NONE)
        self.coordinates: Final[FloatArray] = np.stack([rows, columns, of_patches, none], axis=1).astype(np.float32)
        """[patches, 4]: row, column, window, and none for the text after the patch."""


@lru_cache(maxsize=16)
def _grid(height: int, width: int, merge: int, window: int) -> _Grid:
    return _Grid(height, width, merge, window)


def _interpolated(table: FloatArray, side: int, height: int, width: int) -> FloatArray:
    """Returns the positions [height * width, size] of patches: those of the trained square, bilinearly resized."""
    down, across = (_taps(length, side) for length in (height, width))
    square = table.reshape(side, side, -1)
    made = np.zeros((height, width, square.shape[2]), np.float32)
    for rows, row_weights in down:
        for columns, column_weights in across:
            weights = (row_weights[:, None] * column_weights[None, :])[:, :, None]
            made += square[rows[:, None], columns[None, :]] * weights
    return made.reshape(height * width, -1)


def _taps(length: int, side: int) -> list[tuple[IntArray, FloatArray]]:
    """Returns, for both neighbours of each of `length` positions among `side` trained ones, numbers and weights."""
    at = np.arange(length, dtype=np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
    first = np.floor(at)
    found = []
    for offset in (0, 1):
        distance = np.abs(at - first - np.float32(offset))
        numbers = np.clip(first.astype(np.int64) + offset, 0, side - 1)
        found.append((numbers, np.maximum(np.float32(1.0) - distance, np.float32(0.0))))
    return found


def with_positions(
    rows: FloatArray, prompt: IntArray, image_token: int, sides: Sequence[tuple[int, int]]
) -> FloatArray:
    """Adds the rotary positions of rows in a prompt, as columns after those of `rows`.

    rows: [rows, columns], for each image token of `prompt`. sides: (height, width) of each image in rows.
    The columns are time, height, width, and the position of a text token after the row, which is the first after all
    positions of the image.
    """
    places = np.flatnonzero(prompt == image_token)
    made: list[FloatArray] = []
    shift = 0  # positions minus numbers of tokens
    taken = 0
    for height, width in sides:
        first = int(places[taken]) + shift
        row, column = np.divmod(np.arange(height * width), width)
        after = first + max(height, width)
        columns = [np.full(height * width, first), first + row, first + column, np.full(height * width, after)]
        made.append(np.stack(columns, axis=1).astype(np.float32))
        taken += height * width
        shift = after - (int(places[taken - 1]) + 1)
    return np.ascontiguousarray(np.concatenate([rows, np.concatenate(made)], axis=1), np.float32)
