"""Creates a saved slot of llama-server with a long context, by repeating the keys and values of its first tokens.

The cost of attention after a long prompt depends on the number of keys, not on their values. So a slot restored from
such a file is as slow as one whose prompt took hours to compute. The layout is that of llama.cpp's
llama_state_seq_save_file (version 3), for a model with one kind of attention whose values are not transposed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VERSION = 3
_FIRST_SEQUENCE = 0
_MARK = -1


@dataclass(frozen=True)
class SavedSlot:
    """A parsed file."""

    magic: int
    tokens: NDArray[np.int32]
    rows: list[tuple[int, NDArray[np.uint8]]]
    """For the keys of each layer, and then the values: the number of the type, and one row per token."""

    @classmethod
    def read(cls, data: bytes) -> SavedSlot:
        """Parses a file. Raises ValueError for another layout."""
        magic, version, count = struct.unpack_from("<3I", data)
        if version != VERSION:
            raise ValueError(f"the file has version {version}, not {VERSION}")
        tokens = np.frombuffer(data, np.int32, count, 12)
        at = 12 + tokens.nbytes
        # The server writes a mark, a version and the number of tokens before the tokens, and the number of images after
        # them. It also reads files with only tokens.
        if tokens[0] == _MARK:
            tokens = tokens[3 : 3 + tokens[2]]
        streams, cells = struct.unpack_from("<2I", data, at)
        if streams != 1:
            raise ValueError(f"the file has {streams} streams, not one")
        # Each cell has its position, its number of sequences, and their ids.
        at += 8
        sequences = struct.unpack_from("<I", data, at + 4)[0]
        at += cells * (8 + 4 * sequences)
        transposed, layers = struct.unpack_from("<2I", data, at)
        if transposed:
            raise ValueError("the file has transposed values")
        at += 8
        rows = []
        for _ in range(2 * layers):
            kind, row_bytes = struct.unpack_from("<iQ", data, at)
            rows.append((kind, np.frombuffer(data, np.uint8, cells * row_bytes, at + 12).reshape(cells, row_bytes)))
            at += 12 + cells * row_bytes
        if at != len(data):
            raise ValueError(f"the file has {len(data) - at} bytes more than its layers take")
        return cls(magic, tokens, rows)

    def of_length(self, period: int, length: int) -> bytes:
        """A file with `length` tokens: the first `period` tokens of this one, repeated.

        Raises ValueError if this file has fewer than `period` tokens.
        """
        if period > len(self.tokens):
            raise ValueError(f"the slot has {len(self.tokens)} tokens, not {period}")
        tokens = np.resize(self.tokens[:period], length)
        cells = np.empty((length, 3), np.int32)
        cells[:, 0], cells[:, 1], cells[:, 2] = np.arange(length), 1, _FIRST_SEQUENCE
        parts = [
            struct.pack("<3I", self.magic, VERSION, length), tokens.tobytes(), struct.pack("<2I", 1, length),
            cells.tobytes(), struct.pack("<2I", 0, len(self.rows) // 2),
        ]  # fmt: skip
        for kind, rows in self.rows:
            repeated = rows[np.arange(length) % period]
            parts += [struct.pack("<iQ", kind, rows.shape[1]), repeated.tobytes()]
        return b"".join(parts)
