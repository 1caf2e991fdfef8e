"""The header of a safetensors file: 8 bytes of length, followed by JSON with each tensor's byte range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from ..._core import AdaptrtError
from ..json_fields import describe, parse_json_object

LENGTH_BYTES: Final = 8
# The format's limit; a longer header is damaged or malicious.
MAX_HEADER_BYTES: Final = 100_000_000
# Tensors with this prefix fill alignment gaps, because the format allows no gaps.
PADDING_PREFIX: Final = "__padding__."
_METADATA: Final = "__metadata__"

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, element type and shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A checked header. Offsets count from the start of the file."""

    specs: Mapping[str, TensorSpec]  # In the order of their bytes.
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]
    num_bytes: int  # Size of the whole file.


def serialize_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str], alignment: int
) -> tuple[bytes, list[TensorSpec]]:
    """Returns the bytes before the data, and the tensors to write after them, in order.

    The data begins at a multiple of `alignment`. Padding tensors are inserted to align the others. Raises ValueError
    for names that are empty, repeated or reserved, and for unknown dtypes.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    laid_out: list[TensorSpec] = []
    end = 0

    def append(spec: TensorSpec) -> None:
        nonlocal end
        laid_out.append(spec)
        entries[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes

    for spec in specs:
        if not spec.name or spec.name in entries or spec.name == _METADATA or spec.name.startswith(PADDING_PREFIX):
            raise ValueError(f"tensor name '{spec.name}' is empty, repeated or reserved")
        if spec.dtype not in _DTYPE_NAMES:
            raise ValueError(f"tensor '{spec.name}' is {spec.dtype}, which safetensors cannot hold")
        gap = -end % alignment
        if gap:
            append(TensorSpec(f"{PADDING_PREFIX}{len(laid_out)}", np.dtype(np.uint8), (gap,)))
        append(spec)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % math.lcm(alignment, LENGTH_BYTES))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, laid_out


def parse_header(text: bytes, file_bytes: int, subject: str, error: type[AdaptrtError]) -> Header:
    """Checks a header for consistency, and against the file's size.

    `text` is the JSON after the 8 bytes of length. Raises `error` that lists all problems.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{subject}: damaged header: not UTF-8") from None
    if not decoded.startswith("{"):
        raise error(f"{subject}: damaged header: does not begin with '{{'")
    entries = parse_json_object(decoded, f"{subject}: header", error)
    problems: list[str] = []
    stored = entries.pop(_METADATA, None)
    # MLX writes null for no metadata, and safetensors reads it.
    metadata = {} if stored is None else _checked_metadata(stored, problems)
    tensors = [tensor for name, entry in entries.items() if (tensor := _checked_entry(name, entry, problems))]
    if not problems:
        _check_layout(tensors, file_bytes - LENGTH_BYTES - len(text), problems)
    if problems:
        raise error(f"{subject}: damaged header: " + "; ".join(problems))
    tensors.sort(key=_layout_key)
    data = LENGTH_BYTES + len(text)
    real = [(spec, begin) for spec, begin, _ in tensors if not spec.name.startswith(PADDING_PREFIX)]
    return Header(
        specs={spec.name: spec for spec, _ in real},
        offsets={spec.name: data + begin for spec, begin in real},
        metadata=metadata,
        num_bytes=file_bytes,
    )


_Placed = tuple[TensorSpec, int, int]  # With its range [begin, end) in the data.


def _layout_key(tensor: _Placed) -> tuple[int, int]:
    return tensor[1], tensor[2]  # Empty tensors come before the one that shares their offset.


def _checked_metadata(metadata: object, problems: list[str]) -> dict[str, str]:
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return metadata
    problems.append(f"{_METADATA} is {describe(metadata)}; expected an object of strings")
    return {}


def _checked_entry(name: str, entry: object, problems: list[str]) -> _Placed | None:
    if not name or not (name.isascii() or all(character < "\ud800" or character > "\udfff" for character in name)):
        problems.append(f"{describe(name)} is not a valid tensor name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        problems.append(f"tensor '{name}' is {describe(entry)}; expected dtype, shape and data_offsets")
        return None
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        problems.append(f"tensor '{name}' has dtype {describe(entry['dtype'])}; accepted: {', '.join(_DTYPES)}")
    shape = _sizes(entry["shape"])
    if shape is None:
        problems.append(f"tensor '{name}' has shape {describe(entry['shape'])}; expected sizes")
    offsets = _sizes(entry["data_offsets"])
    if offsets is None or len(offsets) != 2:
        problems.append(f"tensor '{name}' has data_offsets {describe(entry['data_offsets'])}; expected [begin, end]")
        return None
    if dtype is None or shape is None:
        return None
    spec = TensorSpec(name, dtype, shape)
    if offsets[1] - offsets[0] != spec.num_bytes:
        problems.append(
            f"tensor '{name}' of {entry['dtype']} {list(shape)} needs {spec.num_bytes} bytes, but its "
            f"data_offsets are {list(offsets)}"
        )
        return None
    return spec, offsets[0], offsets[1]


def _sizes(value: object) -> tuple[int, ...] | None:
    # Each size is below 2^63, so that products stay cheap to compute.
    limit = 1 << 63
    if not isinstance(value, list) or len(value) > 64:
        return None
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < limit for size in value):
        return None
    return tuple(value)


def _check_layout(tensors: Sequence[_Placed], data_bytes: int, problems: list[str]) -> None:
    end = 0
    for spec, begin, next_end in sorted(tensors, key=_layout_key):
        if begin != end:
            problems.append(f"tensor '{spec.name}' begins at byte {begin} of the data, where {end} was expected")
            return
        end = next_end
    if end != data_bytes:
        problems.append(f"the tensors take {end} bytes, but the file holds {data_bytes} after its header")
