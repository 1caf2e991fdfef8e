"""A file in which TensorRT keeps how long its kernels took, so that the next build need not measure them again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .refusal import Refusal


def read_timing_cache(config: Any, path: Path, refusal: Refusal) -> Any:
    """Gives the builder's config the cache in a file, or an empty one when there is no file; returns it."""
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    # A cache of another GPU or version is refused, not ignored: its file would be replaced.
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        raise refusal.error(f"{path} is not a timing cache of this GPU and this version of TensorRT")
    return cache


def write_timing_cache(cache: Any, path: Path) -> None:
    """Replaces the file by the cache's content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(memoryview(cache.serialize()))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
