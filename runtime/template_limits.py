"""Limits of one rendering of a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering, and of the templates themselves."""

    max_source_characters: int = 1 << 17
    """Number of characters of all templates of a model or an adapter together.

    Real templates have up to about 20,000 each. Compiling the maximum takes up to 10 s while holding the GIL.
    """
    max_characters: int = 1 << 24
    """Maximum size of the rendered text, and of any text, list or object that an expression makes."""
    max_work: int = 1 << 29
    """Bytes that expressions may make. Each operation, loop iteration and call also counts as some bytes."""
    max_seconds: float = 5.0


DEFAULT_LIMITS: Final = TemplateLimits()
