"""Adapter tensors in pickled files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from ..._core import AdapterError, CheckpointError
from ...common.regular_file import read_regular
from ..checkpoint.pickled_file import PickledFile
from .adapter import Array

_MAX_BYTES: Final = 2_000_000_000
"""Size limit in bytes of a pickled adapter, which is read into memory. Larger ones must be converted to safetensors."""


def read_pickle(path: Path) -> dict[str, Array]:
    """Returns all tensors of a file by name. Raises AdapterError if the file cannot be read."""
    try:
        # Reads the file instead of mapping it: if another process truncates a mapped file, this process dies.
        file = PickledFile(path, read_regular(path, _MAX_BYTES))
    except OSError as reason:
        raise AdapterError(f"{path}: cannot be read: {reason.strerror}") from None
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    tensors = {}
    for name, spec in file.specs.items():
        tensors[name] = np.zeros(spec.shape, spec.dtype)
        first = 0
        # A tensor without dimensions has no rows; the caller refuses its shape.
        for piece in file.rows(name, 0, spec.shape[0]) if spec.shape else ():
            tensors[name][first : first + len(piece)] = piece
            first += len(piece)
    return tensors
