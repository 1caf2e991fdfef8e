"""Paths that clients give, before the system is asked about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath


def root_spellings(roots: Sequence[Path]) -> tuple[Path, ...]:
    """The roots with their links resolved, and as they were given if that is another path."""
    return tuple(dict.fromkeys(Path(spell(root)) for spell in (os.path.realpath, os.path.abspath) for root in roots))


def paths_below(spellings: Sequence[Path], path: str) -> list[Path]:
    """The paths below root_spellings() that a client's path may mean; none for one that leads elsewhere.

    Only the text of the path decides. The system would answer differently for /a/../root/x and /b/../root/x if /a
    exists and /b does not, and a client would learn from a status what lies outside of the roots.
    """
    asked = PurePosixPath(path)
    if ".." in asked.parts:
        return []
    return [root / asked for root in spellings if not asked.is_absolute() or asked.is_relative_to(root)]
