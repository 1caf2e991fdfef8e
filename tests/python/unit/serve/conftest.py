"""Frees executors with their test, because each has hundreds of megabytes of address space."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any, Final

import pytest
from fastapi.dependencies import models

_CACHES: Final[list[_lru_cache_wrapper[Any]]] = [
    value for value in vars(models).values() if isinstance(value, _lru_cache_wrapper)
]
"""Caches in which FastAPI keeps the endpoints of all applications, and so their executors."""


@pytest.fixture(autouse=True)
def _applications_end() -> Iterator[None]:
    """Frees the applications that a test made. Does nothing after tests that made none."""
    yield
    if any(cache.cache_info().currsize for cache in _CACHES):
        for cache in _CACHES:
            cache.cache_clear()
        gc.collect()
