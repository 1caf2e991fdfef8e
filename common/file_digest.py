"""Digests of files, read a piece at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from .regular_file import open_regular

_PIECE_BYTES: Final = 1 << 20


def add_file(digest: xxhash.xxh3_128, path: Path) -> None:
    """Takes the bytes of a regular file into a digest.

    Raises OSError for one that cannot be read, or that is written meanwhile.
    """
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
