"""Casts pieces of tensors between the checkpoint dtypes; refuses values that do not fit."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from ..._core import CheckpointError

Array = np.ndarray[Any, np.dtype[Any]]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT16: Final = np.dtype(np.float16)
FLOAT32: Final = np.dtype(np.float32)
FLOAT8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
CHECKPOINT_DTYPES: Final = (FLOAT32, FLOAT16, BFLOAT16)

# Exponent bits. If all are set, the value is infinite or NaN.
_EXPONENT: Final = {BFLOAT16: np.uint16(0x7F80), FLOAT16: np.uint16(0x7C00), FLOAT32: np.uint32(0x7F800000)}


def cast(piece: Array, dtype: np.dtype[Any], subject: str) -> Array:
    """Returns `piece` in `dtype`, rounded to nearest even; the piece itself if it has that dtype.

    Raises CheckpointError, which begins with `subject`, for NaN, infinity, and values that overflow `dtype`.
    """
    bad = _first_not_finite(piece)
    if bad is not None:
        raise CheckpointError(f"{subject}: holds {float(bad)}; weights must be finite")
    if piece.dtype == dtype:
        return piece
    wide = to_float32(piece)
    with np.errstate(over="ignore"):  # checked below, where the tensor is named
        result = wide.astype(dtype, copy=False)
    if dtype != FLOAT32 and _first_not_finite(result) is not None:
        largest = wide.flat[np.abs(wide).argmax()]
        limit = float(ml_dtypes.finfo(dtype).max)
        raise CheckpointError(
            f"{subject}: holds {float(largest):g}, which overflows {dtype} (largest {limit:g}); choose another --dtype"
        )
    return result


def to_float32(piece: Array) -> Array:
    """Returns `piece` as float32, exactly."""
    if piece.dtype == BFLOAT16:
        # bfloat16 is the upper half of float32. numpy shifts without the GIL; ml_dtypes would hold it while casting.
        return np.left_shift(piece.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return piece.astype(np.float32, copy=False)


def _first_not_finite(piece: Array) -> Any | None:
    exponent = _EXPONENT[piece.dtype]
    bits = piece.view(exponent.dtype)
    bad = (bits & exponent) == exponent
    return piece[bad][0] if bad.any() else None
