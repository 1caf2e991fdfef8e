"""Limits of what one rendering of a chat template may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering, and of the templates themselves."""

    max_source_characters: int = 1 << 17
    """Characters of all templates of a model or an adapter together.

    Real ones have up to some 20,000 each. Compiling as many as this takes up to 10 s, under Python's lock.
    """
    max_characters: int = 1 << 24
    """Size of the rendered text, and of any text, list or object that an expression makes."""
    max_work: int = 1 << 29
    """Bytes that expressions make. Each operation, loop turn and call counts for some bytes as well."""
    max_seconds: float = 5.0


DEFAULT_LIMITS: Final = TemplateLimits()
