"""Writes a network as an ONNX file with its weights beside it, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import onnx

from ...plugins import PLUGINS, register_schemas
from ..progress import Advance

# ONNX asks external tensors to start at pages, so that they can be mapped.
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 16 << 20


def external_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the weights that are outside the model."""
    return sum(int(_fields(tensor)["length"]) for tensor in _external(model))


def dump_onnx(model: onnx.ModelProto, weights_dir: Path, path: Path, advance: Advance) -> None:
    """Writes `path`, and the weights as `path`.data beside it, and has onnx.checker check them.

    `weights_dir` holds the files that the model's external tensors refer to. `advance` hears of the bytes.
    """
    dumped = onnx.ModelProto()
    dumped.CopyFrom(model)
    data_path = path.with_name(path.name + ".data")
    with data_path.open("wb") as out:
        for tensor in _external(dumped):
            fields = _fields(tensor)
            out.write(bytes(-out.tell() % _ALIGNMENT))
            offset = out.tell()
            with (weights_dir / fields["location"]).open("rb") as source:
                source.seek(int(fields["offset"]))
                _copy(source, out, int(fields["length"]), advance)
            del tensor.external_data[:]
            for key, value in (
                ("location", data_path.name),
                ("offset", str(offset)),
                ("length", fields["length"]),
            ):
                tensor.external_data.add(key=key, value=value)
    onnx.save_model(dumped, str(path))
    register_schemas(PLUGINS)
    onnx.checker.check_model(str(path), full_check=True)


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _fields(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _copy(source: BinaryIO, out: BinaryIO, num_bytes: int, advance: Advance) -> None:
    while num_bytes > 0:
        piece = source.read(min(_PIECE_BYTES, num_bytes))
        if not piece:
            raise EOFError(f"{source.name}: ends within a tensor")
        out.write(piece)
        advance(len(piece))
        num_bytes -= len(piece)
