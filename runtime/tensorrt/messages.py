"""Collects TensorRT's messages while plans run: its functions return False or None and log the reason."""

from __future__ import annotations

from typing import Any, Final

from ...plugins.tensorrt import Registration

_KEPT: Final = 20


class Messages:
    """Errors that TensorRT logged, and exceptions of plugins."""

    def __init__(self) -> None:
        """Makes an empty list of messages."""
        self._errors: list[str] = []
        self.registration: Registration | None = None

    def add(self, severity: str, text: str) -> None:
        """Adds a message of TensorRT. Keeps only the latest errors."""
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self._errors = [*self._errors[1 - _KEPT :], " ".join(text.split())]

    def take(self) -> str:
        """Returns all messages since the last call, plugins' first."""
        problems = [] if self.registration is None else self.registration.take_problems()
        problems += self._errors
        self._errors = []
        return "; ".join(dict.fromkeys(problems)) or "it gives no reason"


def make_logger(trt: Any, messages: Messages) -> Any:
    """Returns a trt.ILogger that adds to `messages`."""

    def __init__(self: Any) -> None:  # noqa: N807 - of the class made here, whose base is known at run time
        trt.ILogger.__init__(self)

    def log(self: Any, severity: Any, text: str) -> None:
        messages.add(severity.name, text)

    return type("Logger", (trt.ILogger,), {"__init__": __init__, "log": log})()
