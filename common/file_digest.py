"""Digests of files, read a piece at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from .regular_file import open_regular

_PIECE_BYTES: Final = 1 << 20


class Digest(Protocol):
    """A digest of xxhash or hashlib."""

    def update(self, data: bytes, /) -> None:
        """Adds bytes."""


def add_file(digest: Digest, path: Path) -> None:
    """Adds the bytes of a regular file to a digest.

    Raises OSError if the file cannot be read, or is written at the same time.
    """
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
