"""Rows of patches before a vision tower, and joined rows after it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ...formats.models.siglip import SiglipConfig

FloatArray = npt.NDArray[np.float32]

_ALMOST_ONE: Final = np.float32(1.0 - 1e-6)


class PatchRows:
    """The convolution over an image's patches and their positions, in float32."""

    def __init__(self, weight: FloatArray, bias: FloatArray, positions: FloatArray, config: SiglipConfig) -> None:
        """weight: [width, channels, patch_size, patch_size]; bias: [width]; positions: [patches, width]."""
        self._weight = np.ascontiguousarray(weight.reshape(len(weight), -1).T)
        self._bias = bias
        self._positions = positions
        self._config = config

    def of(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows [patches, width] of a square tile [channels, side, side], row by row.

        Pixels after the last whole patch are left out.
        """
        size = self._config.patch_size
        side = pixels.shape[1] // size
        cut = pixels[:, : side * size, : side * size].reshape(len(pixels), side, size, side, size)
        patches = cut.transpose(1, 3, 0, 2, 4).reshape(side * side, -1)
        rows = patches @ self._weight + self._bias + self._positions[_positions(side, self._config.patches_per_side)]
        return np.ascontiguousarray(rows, np.float32)


@lru_cache
def _positions(side: int, trained: int) -> npt.NDArray[np.int64]:
    """Positions [side * side] of a tile's patches in the trained square of positions.

    transformers finds them from fractions of the side in float32, whose rounding moves a few positions of some sizes.
    """
    step = 1.0 / trained
    bounds = (step + np.arange(math.ceil((1.0 - step) / step)) * step).astype(np.float32)
    fractions = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1.0 / side), _ALMOST_ONE)
    along = np.searchsorted(bounds, fractions, side="right")
    return np.asarray(along[:, None] * trained + along[None, :], np.int64).reshape(-1)


def merged_rows(rows: FloatArray, merge: int) -> FloatArray:
    """Joins each square of merge * merge neighbouring rows of [side * side, width].

    Returns [(side / merge)^2, merge^2 * width].
    """
    side, width = math.isqrt(len(rows)), rows.shape[1]
    small = side // merge
    squares = rows.reshape(small, merge, small, merge, width).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(squares).reshape(small * small, merge * merge * width)
