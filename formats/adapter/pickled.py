"""Pickled files of tensors beside an adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from ..._core import AdapterError, CheckpointError
from ...common.regular_file import read_regular
from ..checkpoint.pickled_file import PickledFile
from .adapter import Array

_MAX_BYTES: Final = 2_000_000_000
"""Size limit of a pickled adapter, which is read at once; larger ones are converted to safetensors."""


def read_pickle(path: Path) -> dict[str, Array]:
    """All tensors of a file, by name. Raises AdapterError for one that cannot be read."""
    try:
        # Read instead of mapped: a mapped file that another process cuts ends this process.
        file = PickledFile(path, read_regular(path, _MAX_BYTES))
    except OSError as reason:
        raise AdapterError(f"{path}: cannot be read: {reason.strerror}") from None
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
