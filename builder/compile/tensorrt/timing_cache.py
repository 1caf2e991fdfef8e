"""Stores TensorRT's kernel timings in a file, so that the next build need not measure them again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .refusal import Refusal


def read_timing_cache(config: Any, path: Path, refusal: Refusal) -> Any:
    """Gives the builder's config the cache from a file, or an empty cache if there is no file. Returns the cache."""
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    # A cache of another GPU or version is rejected, not ignored, because its file would be overwritten.
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        raise refusal.error(f"{path} is not a timing cache of this GPU and this version of TensorRT")
    return cache


def write_timing_cache(cache: Any, path: Path) -> None:
    """Replaces the file with the cache's content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(memoryview(cache.serialize()))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
