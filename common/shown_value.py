"""Values in errors: one form and one length for all of them."""

from __future__ import annotations

from typing import Any, Final

_LONGEST: Final = 60
"""Maximum number of characters of a value that an error shows."""


def shown(value: Any) -> str:
    """Formats a value for an error; cut if it is long."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Returns a text as errors show it without quotes: cut if it is long."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
