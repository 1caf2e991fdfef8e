"""The base model's weights as conversion and DoRA normalisation need them: a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..._core import CheckpointError
from .names import DECODER_PREFIXES, ModuleKey
from .peft_reader import FloatArray, read_pickle

# Rows are read in blocks of about this many bytes: a large base costs no more memory than a small one.
BLOCK_BYTES = 16 << 20

_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ACCEPTED_DTYPES = tuple(np.dtype(name) for name in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64))


class BaseWeights(Protocol):
    """Where the weights W[out, in] of the layers under an adapter come from."""

    def describe(self) -> str:
        """What errors call it, such as its directory."""

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in) of this module; None when the base does not have it."""

    def row_blocks(self, key: ModuleKey) -> Iterator[FloatArray]:
        """W's rows in order, as float32 [rows, in]."""


class HuggingFaceBase:
    """A Hugging Face model directory: one or several safetensors files, or .bin files through torch."""

    def __init__(self, directory: Path, *, fan_in_fan_out: bool = False) -> None:
        """Finds out which file holds which tensor; fan_in_fan_out is the adapter's.

        Raises CheckpointError when the directory has no weights.
        """
        self._directory = directory
        self._fan_in_fan_out = fan_in_fan_out
        self._file_of = _locate(directory)
        self._pickle: tuple[Path, dict[str, npt.NDArray[Any]]] | None = None

    def describe(self) -> str:
        """The model directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in); None when the base does not have this module."""
        name = self._name_of(key)
        if name is None:
            return None
        shape = self._stored_shape(name)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor '{name}' has the shape {shape}, expected [out, in]"
            )
        return (shape[1], shape[0]) if self._is_transposed(key) else (shape[0], shape[1])

    def row_blocks(self, key: ModuleKey) -> Iterator[FloatArray]:
        """W's rows in order, as float32 [rows, in]."""
        name, shape = self._name_of(key), self.shape(key)
        if name is None or shape is None:
            raise CheckpointError(f"{self._directory}: has no weight of module '{key.path}'")
        rows = max(1, BLOCK_BYTES // (4 * shape[1]))
        for first in range(0, shape[0], rows):
            block = slice(first, min(first + rows, shape[0]))
            values = self._read(name, block, columns=self._is_transposed(key))
            if values.dtype not in _ACCEPTED_DTYPES:
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor '{name}' is {values.dtype.name}; norms of its rows "
                    "need a floating-point base"
                )
            yield np.ascontiguousarray(values, dtype=np.float32)

    def _is_transposed(self, key: ModuleKey) -> bool:
        return self._fan_in_fan_out and key.is_conv1d

    def _name_of(self, key: ModuleKey) -> str | None:
        bare = key.path[key.path.index("layers.") :]
        candidates = [key.path, *(prefix + bare for prefix in DECODER_PREFIXES)]
        return next((name for path in candidates if (name := f"{path}.weight") in self._file_of), None)

    def _stored_shape(self, name: str) -> list[int]:
        path = self._file_of[name]
        if path.suffix == ".bin":
            return list(self._load_pickle(path)[name].shape)
        with _open(path) as file:
            shape: list[int] = file.get_slice(name).get_shape()
        return shape

    def _read(self, name: str, block: slice, *, columns: bool) -> npt.NDArray[Any]:
        path = self._file_of[name]
        if path.suffix == ".bin":
            tensor = self._load_pickle(path)[name]
            return tensor[:, block].T if columns else tensor[block]
        with _open(path) as file:
            view = file.get_slice(name)
            values: npt.NDArray[Any] = view[:, block].T if columns else view[block]
        return values

    def _load_pickle(self, path: Path) -> dict[str, npt.NDArray[Any]]:
        if self._pickle is None or self._pickle[0] != path:
            self._pickle = None  # one shard in memory at a time
            self._pickle = (path, read_pickle(path, CheckpointError))
        return self._pickle[1]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _locate(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    path = next((directory / name for name in _FILES if (directory / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{directory}: holds no base model; expected one of {', '.join(_FILES)}")
    if path.suffix == ".json":
        try:
            shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            # Shards lie beside their index; a path that leads elsewhere is not followed.
            located = {name: directory / Path(shard).name for name, shard in shard_of.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: has no weight_map of tensor: file") from error
        missing = sorted({str(shard) for shard in located.values() if not shard.is_file()})
        if missing:
            raise CheckpointError(f"{path}: names files that do not exist: {', '.join(missing)}")
        return located
    if path.suffix == ".bin":
        return dict.fromkeys(read_pickle(path, CheckpointError), path)
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)
