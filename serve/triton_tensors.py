"""KServe v2's tensors: checked and read from JSON or from the binary data after it, and written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from .errors import ApiError
from .http import parse_json
from .json_answer import Items, Numbers, json_parts
from .options import ServerLimits

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""Header with the number of JSON bytes in a body; binary tensors follow the JSON."""
BYTES: Final = "BYTES"
MANY_VALUES: Final = 4096

_INTEGERS: Final = {"INT32": "<i4", "INT64": "<i8", "UINT64": "<u8"}
_NUMPY: Final[Mapping[str, npt.DTypeLike]] = {
    **_INTEGERS,
    "BOOL": np.uint8,
    "FP16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "FP32": "<f4",
}
"""Types of the binary format of each datatype. BYTES is missing: each of its elements is preceded by its size."""
_BINARY_ONLY: Final = frozenset({"FP16", "BF16"})
_LENGTH: Final = struct.Struct("<I")
"""The size before each element of BYTES."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    datatypes: tuple[str, ...]
    """Accepted datatypes. The first one is announced."""
    dims: tuple[int, ...]
    """Shape without the batch dimension; -1: any length."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an answer."""

    name: str
    array: npt.NDArray[Any]
    """int32, float32, or object of str."""

    @property
    def datatype(self) -> str:
        """KServe's name of the array's datatype."""
        return {"i": "INT32", "f": "FP32", "O": BYTES}[self.array.dtype.kind]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RequestTensor(_Fields):
    """An element of `inputs`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class RequestedOutput(_Fields):
    """An element of `outputs`."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferBody(_Fields):
    """JSON of an inference request."""

    id: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[RequestTensor]
    outputs: list[RequestedOutput] | None = None


def read_infer(body: bytes, header_length: str | None, limits: ServerLimits) -> tuple[InferBody, memoryview]:
    """Returns the JSON of a body and the binary data after it. Raises ApiError."""
    if header_length is None:
        return parse_json(body, InferBody, limits), memoryview(b"")
    if not (header_length.isascii() and header_length.isdigit()) or int(header_length) > len(body):
        raise ApiError(f"{HEADER_LENGTH} is '{header_length}'; accepted: 0 to the body's {len(body)} bytes")
    length = int(header_length)
    return parse_json(body[:length], InferBody, limits), memoryview(body)[length:]


def read_tensors(
    given: Sequence[RequestTensor], binary: memoryview, specs: Mapping[str, TensorSpec]
) -> dict[str, npt.NDArray[Any]]:
    """Returns {name as sent: array without the batch dimension}. specs: all accepted names.

    Raises ApiError that names the tensor.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    offset = 0
    for tensor in given:
        spec = spec_of(tensor.name, specs)
        if tensor.name in arrays:
            raise ApiError(f"input '{tensor.name}' is given twice", param=tensor.name)
        unknown = set(tensor.parameters) - {"binary_data_size"}
        if unknown:
            raise _error(tensor.name, f"parameter '{min(unknown)}' is not known; accepted: binary_data_size")
        if tensor.datatype not in spec.datatypes:
            raise _error(tensor.name, f"datatype is '{tensor.datatype}'; accepted: {', '.join(spec.datatypes)}")
        shape = _without_batch(spec, tensor.name, tensor.shape)
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            array = _from_json(tensor.name, tensor.datatype, tensor.shape, tensor.data)
        else:
            if tensor.data is not None:
                raise _error(tensor.name, "has data and binary_data_size; send one of them")
            if type(size) is not int or not 0 <= size <= len(binary) - offset:
                raise _error(
                    tensor.name,
                    f"binary_data_size is {size}; {len(binary) - offset} bytes of binary data are left for it",
                )
            array = _from_binary(tensor.name, tensor.datatype, math.prod(shape), binary[offset : offset + size])
            offset += size
        arrays[tensor.name] = array.reshape(shape)
    if offset != len(binary):
        raise ApiError(f"the body has {len(binary)} bytes of binary data; the inputs' binary_data_size are {offset}")
    return arrays


def tensor_of_value(name: str, value: object, specs: Mapping[str, TensorSpec]) -> npt.NDArray[Any]:
    """Converts a scalar or list of the generate extension's JSON to a tensor.

    Raises ApiError that names it.
    """
    spec = spec_of(name, specs)
    data = value if isinstance(value, list) else [value]
    shape: list[int] = []
    level: object = data
    while isinstance(level, list) and len(shape) <= len(spec.dims):
        shape.append(len(level))
        level = level[0] if level else None
    datatype = next(datatype for datatype in spec.datatypes if datatype not in _BINARY_ONLY)
    return _from_json(name, datatype, shape, data).reshape(_without_batch(spec, name, shape))


def spec_of(name: str, specs: Mapping[str, TensorSpec]) -> TensorSpec:
    """Returns the spec of a tensor. Raises ApiError for an unknown name."""
    if name not in specs:
        raise ApiError(f"input '{name}' is not known; accepted: {', '.join(specs)}", param=name)
    return specs[name]


async def write_infer(
    head: Mapping[str, Any], outputs: Sequence[tuple[OutputTensor, bool]]
) -> tuple[bytes, int | None]:
    """Returns a body of `head` and the outputs, and the length of its JSON. Outputs with True are binary.

    The length is None if nothing follows the JSON. Raises ApiError for values that JSON cannot express.
    """
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for output, is_binary in outputs:
        entry: dict[str, Any] = {
            "name": output.name, "datatype": output.datatype, "shape": list(output.array.shape)
        }  # fmt: skip
        if is_binary:
            binary.append(_to_binary(output))
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            entry["data"] = json_values(output)
        described.append(entry)
    header = await json_parts({**head, "outputs": Items(described)})
    return b"".join([*header, *binary]), sum(map(len, header)) if binary else None


def json_values(output: OutputTensor) -> list[Any] | Numbers:
    """Returns all elements in C order. A large array is written in time slices.

    Raises ApiError for values that JSON cannot express.
    """
    if output.datatype == "FP32" and not np.isfinite(output.array).all():
        raise ApiError(
            f"output '{output.name}' has infinite values, which JSON cannot hold; ask for it as binary data",
            param=output.name,
        )
    if output.array.size > MANY_VALUES:
        return Numbers(output.array)
    values: list[Any] = output.array.ravel().tolist()
    return values


def _without_batch(spec: TensorSpec, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape without an optional batch dimension of 1. Raises ApiError if it does not match spec.dims."""
    if any(size < 0 for size in shape):
        raise _error(name, f"shape is {list(shape)}; sizes are at least 0")
    dims = spec.dims
    if len(shape) == len(dims) + 1:
        if shape[0] != 1:
            raise _error(
                name,
                f"shape is {list(shape)}; the batch dimension must be 1: send each sequence as a request of its own",
            )
        shape = shape[1:]
    if len(shape) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, shape, strict=True)):
        accepted = f"{list(dims)} or {[1, *dims]}"
        raise _error(name, f"shape is {list(shape)}; accepted: {accepted}" + (", -1 is any size" if -1 in dims else ""))
    return tuple(shape)


def _from_binary(name: str, datatype: str, count: int, binary: memoryview) -> npt.NDArray[Any]:
    if datatype == BYTES:
        return _texts(name, _split(name, count, binary))
    dtype = np.dtype(_NUMPY[datatype])
    if len(binary) != count * dtype.itemsize:
        raise _error(
            name,
            f"binary_data_size is {len(binary)}; {count} elements of {datatype} have {count * dtype.itemsize} bytes",
        )
    # Copied, because the tensor may be unaligned in the body.
    array: npt.NDArray[Any] = np.frombuffer(binary, dtype).copy()
    if datatype == "BOOL":
        if (array > 1).any():
            raise _error(name, f"has the byte {array.max()}; a BOOL is 0 or 1")
        return array.astype(np.bool_)
    return array


def _split(name: str, count: int, binary: memoryview) -> list[bytes]:
    """Splits binary data into the elements of BYTES."""
    elements: list[bytes] = []
    offset = 0
    # Each element takes at least four bytes, so the loop ends even if `count` is far too large.
    while offset < len(binary) and len(elements) < count:
        begin = offset + _LENGTH.size
        if begin > len(binary) or begin + (length := _LENGTH.unpack_from(binary, offset)[0]) > len(binary):
            raise _error(name, f"element {len(elements)} ends after the tensor's {len(binary)} bytes")
        elements.append(bytes(binary[begin : begin + length]))
        offset = begin + length
    if offset != len(binary) or len(elements) != count:
        raise _error(name, f"its {len(binary)} bytes are not {count} elements, each with its length in front")
    return elements


def _texts(name: str, elements: Sequence[bytes]) -> npt.NDArray[Any]:
    array = np.empty(len(elements), object)
    for i, element in enumerate(elements):
        try:
            array[i] = element.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _error(
                name, f"element {i} is not UTF-8: byte {error.start} is 0x{element[error.start]:02x}"
            ) from error
    return array


def _from_json(name: str, datatype: str, shape: Sequence[int], data: list[Any] | None) -> npt.NDArray[Any]:
    if data is None:
        raise _error(name, "has neither data nor binary_data_size")
    if datatype in _BINARY_ONLY:
        raise _error(name, f"{datatype} is sent as binary data; JSON has no such numbers")
    values = _flat(name, shape, data)
    if len(values) != math.prod(shape):
        raise _error(name, f"has {len(values)} values; shape {list(shape)} has {math.prod(shape)}")
    for i, value in enumerate(values):
        if not _fits(value, datatype):
            raise _error(name, f"value {i} is {json.dumps(value)[:40]}, which is not a value of {datatype}")
    if datatype == BYTES:
        texts = np.empty(len(values), object)
        texts[:] = values
        return texts
    return np.array(values, np.bool_ if datatype == "BOOL" else np.dtype(_NUMPY[datatype]))


def _flat(name: str, shape: Sequence[int], data: list[Any]) -> list[Any]:
    """Flattens data that is flat or nested like the shape."""
    if not any(isinstance(value, list) for value in data):
        return data
    parts: list[Any] = [data]
    for size in shape:
        if any(not isinstance(part, list) or len(part) != size for part in parts):
            raise _error(name, f"data is not nested as the shape {list(shape)} is")
        parts = [value for part in parts for value in part]
    return parts


def _fits(value: object, datatype: str) -> bool:
    if datatype in _INTEGERS:
        limits = np.iinfo(_INTEGERS[datatype])
        return type(value) is int and int(limits.min) <= value <= int(limits.max)
    if datatype == "FP32":
        largest = float(np.finfo(np.float32).max)
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= largest
    return type(value) is (bool if datatype == "BOOL" else str)


def _to_binary(output: OutputTensor) -> bytes:
    if output.datatype != BYTES:
        return output.array.astype(np.dtype(_NUMPY[output.datatype]), copy=False).tobytes()
    elements = [text.encode() for text in output.array.ravel()]
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


def _error(name: str, what: str) -> ApiError:
    return ApiError(f"input '{name}': {what}", param=name)
