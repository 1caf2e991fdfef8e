"""Reads pytorch_model.bin without running code from the pickle."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._core import CheckpointError
from ...common.safetensors_stream import TensorSpec
from ...common.safetensors_stream.reader import PIECE_BYTES
from .casting import Array


class PickledFile:
    """A file of pickled tensors. Needs torch."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Maps the file, or reads its bytes from `content`.

        Raises CheckpointError if torch is missing, and for files that hold anything but tensors.
        """
        self._path = path
        self._in_memory = None if content is None else self._load(content)
        self.specs: Mapping[str, TensorSpec] = {
            name: self._spec(name, tensor) for name, tensor in self._tensors().items()
        }
        if content is not None:
            self._check_total(len(content))

    def rows(self, name: str, first: int, last: int, *, step: int | None = None) -> Iterator[Array]:
        """Yields rows first .. last of a tensor, `step` at a time, or about PIECE_BYTES of them.

        A scalar counts as a row.
        """
        tensor = self._tensors()[name]
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
        if step is None:
            step = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes))
        for begin in range(first, last, step):
            piece = tensor[begin : min(begin + step, last)].contiguous()
            # numpy accepts no bfloat16 from torch, so the bits pass as bytes.
            yield piece.view(_torch(self._path).uint8).numpy().view(self.specs[name].dtype)

    def _tensors(self) -> dict[str, Any]:
        # Maps the file again for each tensor, because pages that were read stay resident as long as the mapping.
        return self._load() if self._in_memory is None else self._in_memory

    def _load(self, content: bytes | None = None) -> dict[str, Any]:
        torch = _torch(self._path)
        if content is not None:
            self._refuse_compression(content)
        try:
            if content is None:
                tensors = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
            else:
                tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as reason:
            # torch's reader raises nearly any exception for a damaged file.
            first_line = str(reason).partition("\n")[0]
            raise CheckpointError(f"{self._path}: cannot be read with weights_only=True: {first_line}") from reason
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{self._path}: expected a dictionary of tensors, found {type(tensors).__name__}")
        others = sorted(str(name) for name, value in tensors.items() if not isinstance(value, torch.Tensor))
        if others:
            raise CheckpointError(f"{self._path}: expected tensors only, found others under {', '.join(others)}")
        return tensors

    def _refuse_compression(self, content: bytes) -> None:
        """Raises CheckpointError if the unpacked entries are larger than the file: torch.save does not compress."""
        file = io.BytesIO(content)
        if not zipfile.is_zipfile(file):  # torch's format before 1.6
            return
        try:
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from None
        if unpacked > len(content):
            raise CheckpointError(
                f"{self._path}: its entries have {unpacked} bytes, but the file {len(content)}; expected a file as "
                "torch.save writes it, without compression"
            )

    def _check_total(self, file_bytes: int) -> None:
        """Raises CheckpointError if tensors share more bytes than a tied pair does."""
        total = sum(spec.num_bytes for spec in self.specs.values())
        if total > 2 * file_bytes:
            raise CheckpointError(
                f"{self._path}: its tensors have {total} bytes, but the file {file_bytes}; expected tensors with bytes "
                "of their own"
            )

    def _spec(self, name: str, tensor: Any) -> TensorSpec:
        try:
            dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        except TypeError:
            raise CheckpointError(
                f"{self._path}: tensor '{name}' is {tensor.dtype}, which cannot be converted"
            ) from None
        if tensor.layout is not _torch(self._path).strided or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{self._path}: tensor '{name}' is {tensor.layout} on {tensor.device}; expected a dense one with values"
            )
        # With strides of 0, a few bytes could stand for any number of elements.
        needed, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if needed > stored:
            raise CheckpointError(
                f"{self._path}: tensor '{name}' {list(tensor.shape)} needs {needed} bytes, but {stored} are stored; "
                "expected a tensor with all its elements"
            )
        return TensorSpec(name, dtype, tuple(tensor.shape))


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path}: pickled checkpoints are read with torch: pip install 'adaptrt[torch]', or convert the file to "
            "safetensors"
        ) from None
    return torch
