"""Pickled files of tensors beside an adapter_config.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..._core import AdapterError, CheckpointError
from ..checkpoint.pickled_file import PickledFile
from .adapter import Array


def read_pickle(path: Path) -> dict[str, Array]:
    """All tensors of a file, by name. Raises AdapterError for one that cannot be read."""
    try:
        file = PickledFile(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    tensors = {}
    for name, spec in file.specs.items():
        tensors[name] = np.zeros(spec.shape, spec.dtype)
        first = 0
        # A tensor without dimensions has no rows and is refused for its shape.
        for piece in file.rows(name, 0, spec.shape[0]) if spec.shape else ():
            tensors[name][first : first + len(piece)] = piece
            first += len(piece)
    return tensors
