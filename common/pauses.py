"""Lets long work of a thread pause for work of other threads that is more urgent."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

_pause: Final[ContextVar[Callable[[], None] | None]] = ContextVar("pause", default=None)


def pause_by(pause: Callable[[], None] | None) -> None:
    """From now on, may_pause() calls this function in this thread, and in threads that run in a copy of its context."""
    _pause.set(pause)


def may_pause() -> None:
    """Waits if this thread should let others work. Long work calls this after each piece of a few milliseconds, while
    it holds no lock that others need.
    """
    pause = _pause.get()
    if pause is not None:
        pause()
