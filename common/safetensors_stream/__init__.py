"""Safetensors files, written and read in pieces, so that neither side holds a whole file in memory."""

from .header import Header, TensorSpec
from .reader import PIECE_BYTES, SafetensorsReader, read_header
from .writer import SafetensorsWriter

__all__ = ["PIECE_BYTES", "Header", "SafetensorsReader", "SafetensorsWriter", "TensorSpec", "read_header"]
