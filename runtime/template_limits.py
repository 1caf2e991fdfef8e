"""Limits of what one rendering of a chat template may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering, and of the templates themselves."""

    max_source_characters: int = 1 << 17
    """Of the templates of a model or an adapter together. Real ones have up to some 20,000 each, and compiling takes
    far longer than reading: up to 10 s for as many, under Python's lock."""
    max_characters: int = 1 << 24
    """Of the rendered text, and of any text, list or object that an expression makes."""
    max_work: int = 1 << 29
    """Bytes that expressions make. Each operation, loop turn and call counts for some bytes as well."""
    max_seconds: float = 5.0


DEFAULT_LIMITS: Final = TemplateLimits()
