"""Reads and writes safetensors files in pieces, so that no whole file is held in memory."""

from .header import Header, TensorSpec, serialize_header
from .reader import PIECE_BYTES, SafetensorsReader, read_header
from .writer import SafetensorsWriter

__all__ = [
    "PIECE_BYTES",
    "Header",
    "SafetensorsReader",
    "SafetensorsWriter",
    "TensorSpec",
    "read_header",
    "serialize_header",
]
