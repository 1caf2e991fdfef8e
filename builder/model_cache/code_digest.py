"""A digest of the code that builds engines, so that a new release does not use an old release's engines."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from ... import _core
from ...common.file_digest import add_file

_ROOMS: Final = ("builder", "common", "formats", "plugins")
"""Packages whose code, together with the core, determines an engine's content."""


def code_digest() -> str:
    """XXH3-128 of the installed sources of these packages and of the core, including their paths."""
    package, core = Path(__file__).parents[2], Path(_core.__file__)
    files = {path.relative_to(package).as_posix(): path for room in _ROOMS for path in (package / room).rglob("*.py")}
    digest = xxhash.xxh3_128()
    for name, path in sorted({**files, core.name: core}.items()):
        digest.update(f"{name}:{path.stat().st_size}\n".encode())
        add_file(path, digest)
    return digest.hexdigest()
