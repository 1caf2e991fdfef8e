"""Parts of errors about names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SHOWN_FILES: Final = 5


def some(names: Sequence[str]) -> str:
    """Lists the first names, and says how many more there are."""
    shown = ", ".join(names[:_SHOWN_FILES])
    more = len(names) - _SHOWN_FILES
    return f"{shown} and {more} more" if more > 0 else shown


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its class if it has none."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
