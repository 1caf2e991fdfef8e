"""Rows of patches before a vision tower, and joined rows after it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from .image_model import FloatArray

_ALMOST_ONE: Final = np.float32(1.0 - 1e-6)


class PatchRows:
    """The convolution over an image's patches, in float32."""

    def __init__(self, weight: FloatArray, bias: FloatArray | None) -> None:
        """weight: [width, channels, patch_size, patch_size]; bias: [width]."""
        self._patch_size = weight.shape[2]
        self._weight = np.ascontiguousarray(weight.reshape(len(weight), -1).T)
        self._bias = bias

    def of(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows [patches, width] of a tile [channels, height, width], row by row.

        Pixels after the last whole patch are left out.
        """
        size = self._patch_size
        height, width = (side // size for side in pixels.shape[1:])
        cut = pixels[:, : height * size, : width * size].reshape(len(pixels), height, size, width, size)
        patches = cut.transpose(1, 3, 0, 2, 4).reshape(height * width, -1)
        rows: FloatArray = patches @ self._weight
        return rows if self._bias is None else rows + self._bias


@lru_cache
def positions_of(side: int, trained: int) -> npt.NDArray[np.int64]:
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
