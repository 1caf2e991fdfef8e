"""Reads pytorch_model.bin, without running what a pickle may carry."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._core import CheckpointError
from ..safetensors_stream import TensorSpec
from ..safetensors_stream.reader import PIECE_BYTES
from .casting import Array


class PickledFile:
    """A file of pickled tensors. Needs torch."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Maps the file, or reads `content`, its bytes.

        Raises CheckpointError without torch, and for files that hold anything but tensors.
        """
        self._path = path
        self._in_memory = None if content is None else self._load(content)
        self.specs: Mapping[str, TensorSpec] = {
            name: self._spec(name, tensor) for name, tensor in self._tensors().items()
        }

    def rows(self, name: str, first: int, last: int, *, step: int | None = None) -> Iterator[Array]:
        """Rows first .. last of a tensor, `step` at a time or about PIECE_BYTES of them. A scalar is a row."""
        tensor = self._tensors()[name]
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
        if step is None:
            step = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes))
        for begin in range(first, last, step):
            piece = tensor[begin : min(begin + step, last)].contiguous()
            # numpy takes no bfloat16 from torch, so the bits pass as bytes.
            yield piece.view(_torch(self._path).uint8).numpy().view(self.specs[name].dtype)

    def _tensors(self) -> dict[str, Any]:
        # Mapped again for each tensor, because pages that were read stay resident for as long as the mapping.
        return self._load() if self._in_memory is None else self._in_memory

    def _load(self, content: bytes | None = None) -> dict[str, Any]:
        torch = _torch(self._path)
        try:
            if content is None:
                tensors = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
            else:
                tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as reason:
            # A damaged file ends torch's reader with nearly any exception there is.
            first_line = str(reason).partition("\n")[0]
            raise CheckpointError(f"{self._path}: cannot be read with weights_only=True: {first_line}") from reason
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{self._path}: expected a dictionary of tensors, found {type(tensors).__name__}")
        others = sorted(str(name) for name, value in tensors.items() if not isinstance(value, torch.Tensor))
        if others:
            raise CheckpointError(f"{self._path}: expected tensors only, found others under {', '.join(others)}")
        return tensors

    def _spec(self, name: str, tensor: Any) -> TensorSpec:
        try:
            dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        except TypeError:
            raise CheckpointError(
                f"{self._path}: tensor '{name}' is {tensor.dtype}, which cannot be converted"
            ) from None
        return TensorSpec(name, dtype, tuple(tensor.shape))


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path}: pickled checkpoints are read with torch: pip install adaptrt[torch], or convert the file to "
            "safetensors"
        ) from None
    return torch
