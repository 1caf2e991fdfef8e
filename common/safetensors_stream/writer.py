"""Writes a safetensors file: the header first, then the tensors in order and in pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from .header import PADDING_PREFIX, TensorSpec, serialize_header

DEFAULT_ALIGNMENT: Final = 1


class SafetensorsWriter:
    """A context manager that writes `path` so that it appears complete or not at all.

        with SafetensorsWriter(path, specs, metadata={"format": "pt"}) as writer:
            for spec in specs:
                for piece in pieces_of(spec):
                    writer.write(spec.name, piece)

    The data goes to a temporary file next to `path`. At the end of the with statement it is renamed to `path` if all
    tensors are complete, and deleted otherwise.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        alignment: int = DEFAULT_ALIGNMENT,
    ) -> None:
        """alignment: every tensor's bytes begin at a multiple of it in the file.

        Raises ValueError for names that are empty, repeated or reserved, and for unknown dtypes.
        """
        self._header, self._specs = serialize_header(specs, metadata or {}, alignment)
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._index = 0
        self._written = 0  # Bytes written of the tensor at _index.

    def write(self, name: str, piece: np.ndarray[Any, np.dtype[Any]] | bytes | memoryview) -> None:
        """Appends the next bytes of tensor `name`, in row-major order.

        An array must have the tensor's dtype, or uint8 for raw bytes. Raises ValueError if another tensor is due, the
        dtype differs, or there are more bytes than the tensor holds.
        """
        if self._index == len(self._specs) or self._specs[self._index].name != name:
            due = self._specs[self._index].name if self._index < len(self._specs) else "none"
            raise ValueError(f"tensor '{name}' was written where '{due}' is due")
        spec = self._specs[self._index]
        if isinstance(piece, np.ndarray):
            if piece.dtype != spec.dtype and piece.dtype != np.uint8:
                raise ValueError(f"tensor '{name}' is {spec.dtype}; a piece of it is {piece.dtype}")
            raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        else:
            raw = memoryview(piece).cast("B")
        if self._written + raw.nbytes > spec.num_bytes:
            raise ValueError(f"tensor '{name}' holds {spec.num_bytes} bytes; more were written")
        self._append(raw)
        self._written += raw.nbytes
        self._skip_complete()

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._temporary.open("wb", buffering=0)
        try:
            self._append(self._header)
            self._skip_complete()
        except OSError:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                return
            if self._index < len(self._specs):
                raise ValueError(f"tensor '{self._specs[self._index].name}' is not complete")
            os.fsync(self._file.fileno())
            self._temporary.replace(self._path)
        finally:
            self._discard()

    def _discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]
        except OSError as reason:
            # The error of a full disk has no file name.
            raise OSError(reason.errno, reason.strerror, str(self._path)) from None

    def _skip_complete(self) -> None:
        while self._index < len(self._specs) and self._written == self._specs[self._index].num_bytes:
            self._index += 1
            self._written = 0
            if self._index < len(self._specs) and self._specs[self._index].name.startswith(PADDING_PREFIX):
                self._append(bytes(self._specs[self._index].num_bytes))
                self._written = self._specs[self._index].num_bytes
