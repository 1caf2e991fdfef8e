"""Checks clients' paths by their text, before the file system sees them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath


def root_spellings(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the roots with links resolved, and also as they were given if that differs."""
    return tuple(dict.fromkeys(Path(spell(root)) for spell in (os.path.realpath, os.path.abspath) for root in roots))


def paths_below(spellings: Sequence[Path], path: str) -> list[Path]:
    """Returns the paths below root_spellings() that a client's path may mean; none for a path that leads elsewhere.

    Only the text of the path decides. The file system would answer differently for /a/../root/x and /b/../root/x if /a
    exists and /b does not, so a client could learn what exists outside the roots.
    """
    asked = PurePosixPath(path)
    if ".." in asked.parts:
        return []
    return [root / asked for root in spellings if not asked.is_absolute() or asked.is_relative_to(root)]
