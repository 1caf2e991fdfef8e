"""Writes a network as an ONNX file with a separate weight file, one piece at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import onnx

from ...common.progress import Advance
from ...plugins import PLUGINS, register_schemas

# ONNX recommends that external tensors start at page boundaries, so that they can be mapped.
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 16 << 20


def external_bytes(model: onnx.ModelProto) -> int:
    """Size of the weights stored outside of the model."""
    return sum(int(_fields(tensor)["length"]) for tensor in _external(model))


def dump_onnx(model: onnx.ModelProto, weights_dir: Path, path: Path, advance: Advance) -> None:
    """Writes the graph to `path` and the weights to `path`.data, and checks both with onnx.checker.

    weights_dir: has the files that the model's external tensors refer to.
    advance: called with the number of bytes written.

    Both files appear only when both are complete. Raises OSError that names `path`.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
            unfinished = Path(directory) / path.name
            _write(model, weights_dir, unfinished, advance)
            _data_path(unfinished).replace(_data_path(path))
            unfinished.replace(path)
    except OSError as reason:
        # The error of a full disk has no file name, or only that of the temporary directory.
        raise OSError(reason.errno, reason.strerror, str(path)) from None


def _write(model: onnx.ModelProto, weights_dir: Path, path: Path, advance: Advance) -> None:
    dumped = onnx.ModelProto()
    dumped.CopyFrom(model)
    with _data_path(path).open("wb") as out:
        for tensor in _external(dumped):
            fields = _fields(tensor)
            out.write(bytes(-out.tell() % _ALIGNMENT))
            offset = out.tell()
            with (weights_dir / fields["location"]).open("rb") as source:
                source.seek(int(fields["offset"]))
                _copy(source, out, int(fields["length"]), advance)
            del tensor.external_data[:]
            for key, value in (
                ("location", _data_path(path).name),
                ("offset", str(offset)),
                ("length", fields["length"]),
            ):
                tensor.external_data.add(key=key, value=value)
    onnx.save_model(dumped, str(path))
    register_schemas(PLUGINS)
    onnx.checker.check_model(str(path), full_check=True)


def _data_path(path: Path) -> Path:
    return path.with_name(path.name + ".data")


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
