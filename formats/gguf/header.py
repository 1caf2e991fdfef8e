"""Reads the header of a GGUF file: the metadata, and the name, shape, type and place of each tensor.

Nothing in the file is trusted: every count, length and offset is checked against the size of the file before it is
used, so a damaged file costs an error, not memory.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from ..._core import CheckpointError
from ...common.shown_value import shown
from .blocks import ACCEPTED_TYPES, TYPES, BlockType, unread_type

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_LONGEST_TENSOR_NAME: Final = 63
_LONGEST_KEY: Final = 65535
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_NUMBERS: Final[Mapping[int, np.dtype[Any]]] = {
    number: np.dtype(kind).newbyteorder("<")
    for number, kind in {
        0: "u1",
        1: "i1",
        2: "u2",
        3: "i2",
        4: "u4",
        5: "i4",
        6: "f4",
        7: "u1",
        10: "u8",
        11: "i8",
        12: "f8",
    }.items()
}
"""Types of metadata values by their numbers. The others are 8 (string) and 9 (array)."""
_LENGTH: Final = struct.Struct("<Q")
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_MIN_ENTRY_BYTES: Final = 8 + 4 + 1

Value = bool | int | float | str | list[str] | np.ndarray[Any, np.dtype[Any]]
"""Value of a metadata key. Arrays of numbers are numpy arrays, those of strings are lists."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's description in the header."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    """Shape in numpy's order: the last dimension is contiguous."""
    offset: int
    """Offset of its bytes in the file."""

    @property
    def row_bytes(self) -> int:
        """Size of a row, along the last dimension."""
        return self.type.bytes_of(self.shape[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows, over all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def parse_header(content: bytes | mmap.mmap, subject: str) -> GgufHeader:
    """Reads the header at the beginning of a whole file, given by its bytes or its mapping.

    Raises CheckpointError, which begins with `subject`, for files that are not GGUF, are cut off, contradict
    themselves, or have a version, byte order or tensor type that is not read.
    """
    return _Parser(memoryview(content), subject).header()


class _Parser:
    def __init__(self, content: memoryview, subject: str) -> None:
        self._bytes = content
        self._subject = subject
        self._at = 0
        self._what = "the header"

    def header(self) -> GgufHeader:
        magic = bytes(self._bytes[:4])
        if magic != MAGIC:
            self._fail(f"begins with {magic!r}; expected {MAGIC!r}, as GGUF files do")
        self._at = 4
        version = self._number("<I")
        if version & 0xFFFF == 0 and version:
            self._fail("is big-endian; expected a little-endian file (convert it with gguf_convert_endian.py)")
        if version not in VERSIONS:
            newer = ", a newer one" if version > max(VERSIONS) else ""
            self._fail(f"has GGUF version {version}{newer}; accepted: {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        self._check_count("metadata keys", num_entries, _MIN_ENTRY_BYTES)
        self._check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)
        metadata: dict[str, Value] = {}
        for number in range(num_entries):
            self._what = f"metadata key {number}"
            key = self._text(_LONGEST_KEY)
            if key in metadata:
                self._fail(f"metadata key '{key}' occurs twice")
            self._what = f"metadata key '{key}'"
            metadata[key] = self._value(self._number("<I"))
        described = self._described_tensors(num_tensors)
        return GgufHeader(version, metadata, self._placed(described, self._alignment(metadata)))

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(value, bool) or not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
            self._fail(f"general.alignment is {shown(value)}; expected a power of two from 8 to {1 << 20}")
        return int(value)

    def _described_tensors(self, count: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for number in range(count):
            self._what = f"tensor {number}"
            name = self._text(_LONGEST_TENSOR_NAME)
            if name in tensors:
                self._fail(f"tensor '{name}' occurs twice")
            self._what = f"tensor '{name}'"
            num_dimensions = self._number("<I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor '{name}' has {num_dimensions} dimensions; expected 1 to {_MAX_DIMENSIONS}")
            sizes = [self._number("<Q") for _ in range(num_dimensions)]
            kind, offset = self._number("<I"), self._number("<Q")
            tensors[name] = GgufTensor(name, self._type(name, kind), tuple(reversed(sizes)), offset)
        return tensors

    def _type(self, name: str, number: int) -> BlockType:
        if number not in TYPES:
            self._fail(
                f"tensor '{name}' is of type {unread_type(number)}, which is not read; accepted: {ACCEPTED_TYPES}. "
                "Take a file of the model in another quantisation, such as Q4_K_M or Q8_0"
            )
        return TYPES[number]

    def _placed(self, tensors: Mapping[str, GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Turns offsets from the data's begin into offsets in the file, and checks that each tensor has its own bytes
        in it."""
        begin = -(-self._at // alignment) * alignment
        placed = {}
        for name, tensor in tensors.items():
            width, size = tensor.shape[-1], tensor.type.block_size
            if 0 in tensor.shape or width % size != 0:
                self._fail(
                    f"tensor '{name}' of type {tensor.type.name} is {list(tensor.shape)}; expected rows of a multiple "
                    f"of {size} values, and at least one"
                )
            if tensor.offset % alignment != 0:
                self._fail(f"tensor '{name}' is at offset {tensor.offset}; expected a multiple of {alignment}")
            end = begin + tensor.offset + tensor.num_bytes
            if end > len(self._bytes):
                self._fail(
                    f"ends at byte {len(self._bytes)}, but tensor '{name}' ends at byte {end}; the file is cut off, "
                    "download it again"
                )
            placed[name] = GgufTensor(name, tensor.type, tensor.shape, begin + tensor.offset)
        ordered = sorted(placed.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.num_bytes > after.offset:
                self._fail(f"tensors '{before.name}' and '{after.name}' overlap; expected each with bytes of its own")
        return placed

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        dtype = self._number_type(kind)
        value: int | float = self._take(dtype.itemsize).view(dtype)[0].item()
        return self._boolean(int(value)) if kind == _BOOL else value

    def _array(self) -> Value:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            self._check_count(f"strings in {self._what}", count, 8)
            return self._texts(count)
        if kind == _ARRAY:
            self._fail(f"{self._what} is an array of arrays; expected an array of numbers or strings")
        dtype = self._number_type(kind)
        self._check_count(f"values in {self._what}", count, dtype.itemsize)
        values: np.ndarray[Any, np.dtype[Any]] = self._take(count * dtype.itemsize).view(dtype).copy()
        return values

    def _number_type(self, kind: int) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            self._fail(f"{self._what} has a value of type {kind}; expected 0 to 12")
        return _NUMBERS[kind]

    def _boolean(self, value: int) -> bool:
        if value > 1:
            self._fail(f"{self._what} is a boolean of {value}; expected 0 or 1")
        return value == 1

    def _text(self, longest: int | None = None) -> str:
        length = self._number("<Q")
        if longest is not None and length > longest:
            self._fail(f"{self._what} has a name of {length} bytes; expected at most {longest}")
        try:
            return self._take(length).tobytes().decode("utf-8")
        except UnicodeDecodeError as reason:
            self._fail(f"{self._what} has a string that is not UTF-8: {reason.reason} at byte {reason.start}")

    def _texts(self, count: int) -> list[str]:
        """Like _text() for each, but fast: vocabularies have hundreds of thousands of texts."""
        content, at, size, texts = self._bytes, self._at, len(self._bytes), []
        for _ in range(count):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(content, at)[0] if begin <= size else size + 1
            if at > size:
                break
            try:
                texts.append(str(content[begin:at], "utf-8"))
            except UnicodeDecodeError:
                self._at = begin - _LENGTH.size
                return [*texts, self._text()]
        if len(texts) < count:
            self._take(size - self._at + 1)
        self._at = at
        return texts

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)).tobytes())[0])

    def _take(self, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rest = len(self._bytes) - self._at
        if length > rest:
            self._fail(
                f"ends at byte {len(self._bytes)}, but {self._what} needs {length} bytes from byte {self._at} on; the "
                "file is cut off, download it again"
            )
        begin, self._at = self._at, self._at + length
        return np.frombuffer(self._bytes[begin : self._at], np.uint8)

    def _check_count(self, what: str, count: int, each: int) -> None:
        rest = len(self._bytes) - self._at
        if count * each > rest:
            self._fail(
                f"declares {count} {what}, but only {rest} bytes follow; the file is damaged or cut off, download it "
                "again"
            )

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._subject}: {problem}")
