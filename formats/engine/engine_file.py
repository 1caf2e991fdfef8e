"""The engine file: a safetensors container of packed tensors, their program, and checksums.

docs/formats.md describes it. It holds no code, and every byte is checked before use.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from ..._core import EngineError, MappedFile
from ...common.file_lock import mark_in_use
from ...common.json_fields import parse_json_object
from ...common.safetensors_stream import (
    PIECE_BYTES,
    SafetensorsReader,
    SafetensorsWriter,
    TensorSpec,
    serialize_header,
)
from .plan import Program
from .plan_json import program_from_json, program_to_json

FORMAT: Final = "adaptrt.engine"
FORMAT_VERSION: Final = 9
ALIGNMENT: Final = 64
"""Minimum alignment of tensors in the file, in bytes."""
CHECKSUMS: Final = "checksums"
"""Name of the last tensor: XXH3-64 of each tensor before it, in file order."""

Array = np.ndarray[Any, np.dtype[Any]]
TensorBytes = Callable[[], Iterator[Array]]


@dataclass(frozen=True)
class EngineTensor:
    """A flat tensor to write, provided in pieces."""

    name: str
    dtype: np.dtype[Any]
    size: int
    pieces: TensorBytes
    alignment: int = ALIGNMENT
    """Alignment in bytes. The largest one applies to all tensors of the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return self.size * self.dtype.itemsize


def write_engine_file(path: Path, program: Program, tensors: list[EngineTensor], advance: Callable[[int], None]) -> str:
    """Writes an engine file piece by piece; returns the checksum that config.json stores."""
    specs, metadata, alignment = _header_of(program, tensors)
    checksums = []
    with SafetensorsWriter(path, specs, metadata=metadata, alignment=alignment) as writer:
        for tensor in tensors:
            digest = xxhash.xxh3_64()
            for piece in tensor.pieces():
                digest.update(piece.view(np.uint8).data)
                writer.write(tensor.name, piece)
                advance(piece.nbytes)
            checksums.append(digest.intdigest())
        writer.write(CHECKSUMS, np.asarray(checksums, np.uint64))
    reader = SafetensorsReader(path, EngineError)
    return _header_checksum(path, reader)


@dataclass(frozen=True)
class EngineLayout:
    """The program of an engine file and the places of its tensors; their content is neither read nor checked."""

    program: Program
    tensors: Mapping[str, Array]
    """Views of `file_bytes`, by name."""
    file_bytes: np.ndarray[Any, np.dtype[np.uint8]]
    """The whole file."""

    @classmethod
    def planned(cls, program: Program, tensors: list[EngineTensor]) -> EngineLayout:
        """The layout of the file that write_engine_file() would write. It takes address space, but no memory."""
        header, specs = serialize_header(*_header_of(program, tensors))
        num_bytes = len(header) + sum(spec.num_bytes for spec in specs)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        whole = np.frombuffer(pages, np.uint8)
        begins = itertools.accumulate((spec.num_bytes for spec in specs), initial=len(header))
        views = {
            spec.name: whole[begin : begin + spec.num_bytes].view(spec.dtype)
            for spec, begin in zip(specs, begins, strict=False)
        }
        return cls(program, views, whole)

    @classmethod
    def of_file(cls, path: Path) -> EngineLayout:
        """The layout of an engine file. Raises EngineError if it is of another version or its header is damaged."""
        reader = SafetensorsReader(path, EngineError)
        _check_version(path, reader.metadata)
        program = parse_json_object(reader.metadata["program"], f"{path}: program", EngineError)
        tensors = {name: reader.array(name) for name in reader.specs}
        return cls(program_from_json(program, str(path)), tensors, reader.file_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.file_bytes.nbytes


class EngineFile:
    """A mapped engine file whose every byte was checked."""

    def __init__(
        self,
        path: Path,
        checksum: str,
        content: bytes | bytearray | memoryview | None = None,
        *,
        keeps_in_memory: bool = True,
    ) -> None:
        """`checksum` is the one that write_engine_file returned; `content` replaces the file's bytes, and is copied.

        keeps_in_memory: False for a file larger than memory: it is checked in pieces that do not stay in memory, and
            without the mapping.

        Raises EngineError with the path and the problem.
        """
        self.path = path
        self._keeps_in_memory = keeps_in_memory
        if content is None:
            try:
                self._in_use = mark_in_use(path)  # so that the engine cache does not delete it
            except OSError as reason:
                raise EngineError(f"{path}: cannot be read: {reason.strerror}") from None
        self._reader = SafetensorsReader(path, EngineError, content)
        self.mapped_file: Final = None if content is not None else MappedFile(self._reader.file_bytes, str(path))
        metadata = self._reader.metadata
        _check_version(path, metadata)
        if _header_checksum(path, self._reader) != checksum:
            raise EngineError(f"{path}: its header does not match config.json")
        self._check_data()
        program = parse_json_object(metadata["program"], f"{path}: program", EngineError)
        self.program: Final = program_from_json(program, str(path))

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._reader.num_bytes

    @property
    def tensors(self) -> Mapping[str, Array]:
        """Views of the mapping by name; each keeps the mapping alive."""
        return {name: self._reader.array(name) for name in self._reader.specs if name != CHECKSUMS}

    @property
    def file_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A read-only view of the whole file."""
        return self._reader.file_bytes

    def _check_data(self) -> None:
        """Compares every tensor with its checksum, and the gaps between tensors with zeros."""
        names = [name for name in self._reader.specs if name != CHECKSUMS]
        checksums = self._reader.array(CHECKSUMS)
        if checksums.dtype != np.uint64 or checksums.shape != (len(names),):
            raise EngineError(f"{self.path}: tensor '{CHECKSUMS}' is {checksums.dtype} {list(checksums.shape)}")
        for name, checksum in zip(names, checksums.tolist(), strict=True):
            digest = xxhash.xxh3_64()
            for piece in self._content(name):
                digest.update(piece)
            if self.mapped_file is not None:
                self.mapped_file.check()
            if digest.intdigest() != checksum:
                raise EngineError(f"{self.path}: tensor '{name}' does not have its checksum; the file is damaged")
        if any(gap.any() for gap in self._gaps()):
            raise EngineError(f"{self.path}: a gap between tensors is not empty; the file is damaged")
        if not self._keeps_in_memory:
            self._reader.release()

    def _content(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of a tensor."""
        if self._keeps_in_memory:
            yield self._reader.array(name).view(np.uint8).data
        else:
            yield from read_once(self.path, self._reader.offset(name), self._reader.specs[name].num_bytes)

    def _gaps(self) -> Iterator[Array]:
        whole = self._reader.file_bytes
        specs = list(self._reader.specs.values())
        for spec, following in itertools.pairwise(specs):
            yield whole[self._reader.offset(spec.name) + spec.num_bytes : self._reader.offset(following.name)]


def _header_of(program: Program, tensors: list[EngineTensor]) -> tuple[list[TensorSpec], dict[str, str], int]:
    """Returns the tensors, the metadata and the alignment of an engine file."""
    specs = [TensorSpec(tensor.name, tensor.dtype, (tensor.size,)) for tensor in tensors]
    specs.append(TensorSpec(CHECKSUMS, np.dtype(np.uint64), (len(tensors),)))
    metadata = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "program": json.dumps(program_to_json(program), separators=(",", ":")),
    }
    return specs, metadata, max((tensor.alignment for tensor in tensors), default=ALIGNMENT)


def read_once(path: Path, offset: int, num_bytes: int) -> Iterator[memoryview]:
    """Yields bytes of a file in pieces, without leaving them in the page cache. Each is valid until the next one.

    Raises EngineError if they cannot be read.
    """
    buffer = memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes > 0:
                count = os.preadv(file.fileno(), [buffer[:num_bytes]], offset)
                if count == 0:
                    raise EngineError(f"{path}: ends at byte {offset}; it became shorter while it was read")
                if hasattr(os, "posix_fadvise"):  # macOS has none
                    os.posix_fadvise(file.fileno(), offset, count, os.POSIX_FADV_DONTNEED)
                yield buffer[:count]
                offset, num_bytes = offset + count, num_bytes - count
    except OSError as reason:
        raise EngineError(f"{path}: cannot be read: {reason.strerror}") from None


def _check_version(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise EngineError(f"{path}: is not an engine of AdaptRT (its format is {metadata.get('format')!r})")
    version = metadata.get("version")
    if version != str(FORMAT_VERSION):
        raise EngineError(
            f"{path}: has format version {version!r}, this release reads {FORMAT_VERSION}; build the engine again"
        )
    if "program" not in metadata:
        raise EngineError(f"{path}: holds no program")


def _header_checksum(path: Path, reader: SafetensorsReader) -> str:
    """Returns the XXH3-128 of the bytes before the data and of the tensors' checksums."""
    if CHECKSUMS not in reader.specs or list(reader.specs)[-1] != CHECKSUMS:
        raise EngineError(f"{path}: its last tensor is not '{CHECKSUMS}'")
    digest = xxhash.xxh3_128()
    data = min(reader.offset(name) for name in reader.specs)
    digest.update(reader.file_bytes[:data].data)
    digest.update(reader.array(CHECKSUMS).view(np.uint8).data)
    return digest.hexdigest()
