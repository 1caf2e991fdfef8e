"""Digests of files, read a piece at a time."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Protocol

from .pauses import may_pause
from .regular_file import open_regular

_PIECE_BYTES: Final = 1 << 20


class Digest(Protocol):
    """A digest of xxhash or hashlib."""

    def update(self, data: bytes, /) -> None:
        """Adds bytes."""


def add_file(path: Path, *digests: Digest) -> None:
    """Reads a regular file once, and adds its bytes to the digests.

    Raises OSError if the file cannot be read, or is written at the same time.
    """
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            for digest in digests:
                digest.update(piece)
            may_pause()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hex. Raises OSError like add_file()."""
    digest = hashlib.sha256()
    add_file(path, digest)
    return digest.hexdigest()
