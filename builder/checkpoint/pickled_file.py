"""Reads pytorch_model.bin, without running what a pickle may carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._core import CheckpointError
from ..safetensors_stream import TensorSpec
from ..safetensors_stream.reader import PIECE_BYTES
from .casting import Array


class PickledFile:
    """An open file of pickled tensors. Needs torch."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError without torch, and for files that hold anything but tensors."""
        try:
            import torch
        except ImportError:
            raise CheckpointError(
                f"{path}: pickled checkpoints are read with torch: pip install adaptrt[torch], or convert "
                "the file to safetensors"
            ) from None
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as reason:
            # A damaged file ends torch's reader with nearly any exception there is.
            first_line = str(reason).partition("\n")[0]
            raise CheckpointError(f"{path}: cannot be read with weights_only=True: {first_line}") from reason
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{path}: expected a dictionary of tensors, found {type(tensors).__name__}")
        others = sorted(str(name) for name, value in tensors.items() if not isinstance(value, torch.Tensor))
        if others:
            raise CheckpointError(f"{path}: expected tensors only, found others under {', '.join(others)}")
        self._torch = torch
        self._tensors: dict[str, Any] = tensors
        self.specs: Mapping[str, TensorSpec] = {name: _spec(name, tensor, path) for name, tensor in tensors.items()}

    def rows(self, name: str, first: int, last: int) -> Iterator[Array]:
        """Rows first .. last of a tensor, in pieces."""
        tensor = self._tensors[name]
        step = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes))
        for begin in range(first, last, step):
            piece = tensor[begin : min(begin + step, last)].contiguous()
            # torch has no bfloat16 in common with numpy, so the bits pass as integers.
            yield piece.view(self._torch.uint8).numpy().view(self.specs[name].dtype)


def _spec(name: str, tensor: Any, path: Path) -> TensorSpec:
    try:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:
        raise CheckpointError(f"{path}: tensor '{name}' is {tensor.dtype}, which cannot be converted") from None
    return TensorSpec(name, dtype, tuple(tensor.shape))
