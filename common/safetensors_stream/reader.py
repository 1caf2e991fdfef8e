"""Reads a safetensors file, mapped or copied into memory: views of whole tensors, or rows in pieces."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from ..._core import AdaptrtError, CheckpointError
from ..parallel import in_threads
from ..pauses import may_pause
from ..regular_file import open_regular, read_at
from .header import LENGTH_BYTES, MAX_HEADER_BYTES, Header, TensorSpec, parse_header

PIECE_BYTES: Final = 4 << 20


class SafetensorsReader:
    """An open safetensors file with a checked header.

    Arrays are read-only views of the mapping or the copy. They keep it alive after the reader is deleted.
    """

    def __init__(
        self,
        path: Path,
        error: type[AdaptrtError] = CheckpointError,
        content: bytes | bytearray | memoryview | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        """Maps the file, or a copy in memory of `content`, the file's bytes.

        in_memory: reads the whole file instead of mapping it. If another process truncates a mapped file, SIGBUS ends
        this process; so files that others may write must be read.

        Raises `error` if the file cannot be read, its header is damaged, or, with `in_memory`, it was written
        meanwhile.
        """
        self.path = path
        self._error = error
        self._map: mmap.mmap | None = None
        if in_memory:
            self._bytes, self._header = self._read_whole(path)
            self._bytes.flags.writeable = False
            return
        if content is not None:
            num_bytes = memoryview(content).nbytes
            self._map = mmap.mmap(-1, max(num_bytes, 1))
            self._map.write(content)
            self._map.seek(0)
            self._header = _header_in(self._map, num_bytes, path, error)
        else:
            try:
                with path.open("rb") as file:
                    file_bytes = file.seek(0, 2)
                    file.seek(0)
                    self._header = _header_in(file, file_bytes, path, error)
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as reason:
                raise error(f"{path}: cannot be read: {reason.strerror}") from None
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._bytes.flags.writeable = False

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors by name, in the order of their bytes, without padding tensors."""
        return self._header.specs

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's __metadata__."""
        return self._header.metadata

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._header.num_bytes

    @property
    def file_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A read-only view of the whole file."""
        return self._bytes

    def offset(self, name: str) -> int:
        """Offset of a tensor's bytes in the file."""
        return self._header.offsets[self._known(name).name]

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A read-only view of a tensor, without a copy. Raises the reader's error for an unknown name."""
        spec = self._known(name)
        begin = self._header.offsets[name]
        return self._bytes[begin : begin + spec.num_bytes].view(spec.dtype).reshape(spec.shape)

    def rows(
        self, name: str, first: int = 0, last: int | None = None, *, step: int | None = None
    ) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """Rows first .. last of a tensor, `step` at a time or about PIECE_BYTES of them, each a view of the mapping.

        A scalar counts as one row.

        The pages of a piece are released when the next piece is requested, so that reading a file of any size takes no
        more memory than a piece.
        """
        array = np.atleast_1d(self.array(name))
        last = array.shape[0] if last is None else last
        row_bytes = max(1, array[:1].nbytes)
        step = max(1, PIECE_BYTES // row_bytes) if step is None else step
        for begin in range(first, last, step):
            end = min(begin + step, last)
            yield array[begin:end]
            self._release(self.offset(name) + begin * row_bytes, (end - begin) * row_bytes)

    def release(self) -> None:
        """Releases the pages of the mapping; later reads load them from the file again.

        A copy in memory stays.
        """
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _release(self, begin: int, num_bytes: int) -> None:
        if self._map is None:
            return
        # Pages at both ends may hold other tensors. Releasing them too only costs another read from the page cache.
        first = begin - begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, begin + num_bytes - first)

    def _known(self, name: str) -> TensorSpec:
        try:
            return self._header.specs[name]
        except KeyError:
            raise self._error(f"{self.path}: has no tensor '{name}'") from None

    def _read_whole(self, path: Path) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Header]:
        try:
            with open_regular(path) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                header = _header_in(file, file_bytes, path, self._error)
                content = np.empty(file_bytes, np.uint8)

                def read_piece(first: int) -> None:
                    read_at(file, path, content.data[first : first + PIECE_BYTES], first)
                    may_pause()

                in_threads(read_piece, range(0, file_bytes, PIECE_BYTES))
        except OSError as reason:
            raise self._error(f"{path}: cannot be read: {reason.strerror}") from None
        return content, header


def read_header(path: Path, error: type[AdaptrtError] = CheckpointError) -> Header:
    """The checked header of a file that others may write. Reads no tensor. Raises `error` as SafetensorsReader()."""
    try:
        with open_regular(path) as file:
            return _header_in(file, os.fstat(file.fileno()).st_size, path, error)
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from None


def _header_in(
    file: BinaryIO | io.FileIO | mmap.mmap, file_bytes: int, path: Path, error: type[AdaptrtError]
) -> Header:
    """Reads the header at the current position of `file`, which has `file_bytes` bytes in total."""
    length = _header_length(file.read(LENGTH_BYTES), file_bytes, path, error)
    return parse_header(file.read(length), file_bytes, str(path), error)


def _header_length(prefix: bytes, file_bytes: int, path: Path, error: type[AdaptrtError]) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise error(f"{path}: has {file_bytes} bytes; a safetensors file has at least {LENGTH_BYTES}")
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise error(
            f"{path}: declares a header of {length} bytes; a file of {file_bytes} bytes can have at most {limit}"
        )
    return length
