"""Forwards TensorRT's log and progress to the parent."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from .messages import LOG, PHASE

Send = Callable[[dict[str, Any]], None]

_SECONDS_BETWEEN_PHASES: Final = 0.1
# Number of verbose messages kept, to find the node that TensorRT last mentioned.
_KEPT: Final = 64
# Start of the list of a plan's layers.
_LAYERS: Final = "Engine Layer Information:"


class Log:
    """Collects log messages; make_logger() connects it to TensorRT."""

    def __init__(self, send: Send) -> None:
        """`send` receives every message immediately, except verbose ones."""
        self._send = send
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self.errors: list[str] = []
        self.layers = ""
        """TensorRT's description of the plan's layers."""

    def add(self, severity: str, text: str) -> None:
        """Takes a message from TensorRT."""
        if severity == "VERBOSE":
            self._recent.append(text)
            if text.startswith(_LAYERS):
                self.layers = text
            return
        if severity in ("ERROR", "INTERNAL_ERROR") and text not in self.errors:
            self.errors.append(text)
        self._send({"kind": LOG, "severity": severity, "text": text})

    def last_node(self, operators: Mapping[str, str]) -> str | None:
        """Name of the network's node that the last verbose messages mention."""
        for text in reversed(self._recent):
            found = nodes_named(text, operators)
            if found:
                return found[-1]
        return None


def nodes_named(text: str, operators: Mapping[str, str]) -> list[str]:
    """Names of the network's nodes that occur in a message."""
    words = re.findall(r"[\w/]+(?:\.[\w/]+)*", text)
    return list(dict.fromkeys(word for word in words if word in operators))


def make_logger(trt: Any, log: Log) -> Any:
    """A trt.ILogger that fills `log`."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            log.add(severity.name, text)

    return Logger()


class Phases:
    """Progress of a build from TensorRT's nested phases; make_progress_monitor() connects it to TensorRT.

    TensorRT does not announce its phases in advance. A phase counts as one step of the enclosing phase, so the fraction
    grows, but not evenly.
    """

    def __init__(self, send: Send, every_step: Callable[[], None]) -> None:
        """`every_step` is called after each step of each phase."""
        self._send = send
        self._every_step = every_step
        # Steps done and total steps of each running phase, outermost first.
        self._running: dict[str, tuple[int, int]] = {}
        self._fraction = 0.0
        self._last_sent = 0.0

    def start(self, phase: str, num_steps: int) -> None:
        """Starts a phase within the running ones. A phase announced without steps counts as one step."""
        self._running[phase] = (0, max(num_steps, 1))
        self._tell(phase)

    def step(self, phase: str, step: int) -> None:
        """Completes step `step` of a phase, counted from 0."""
        if phase in self._running:
            _, num_steps = self._running[phase]
            self._running[phase] = (min(step + 1, num_steps), num_steps)
        self._every_step()
        self._tell(phase)

    def finish(self, phase: str) -> None:
        """Ends a phase."""
        self._running.pop(phase, None)

    def _tell(self, phase: str) -> None:
        width, done = 1.0, 0.0
        for steps, num_steps in self._running.values():
            width /= num_steps
            done += steps * width
        self._fraction = max(self._fraction, min(done, 1.0))
        now = time.monotonic()
        if now - self._last_sent >= _SECONDS_BETWEEN_PHASES:
            self._last_sent = now
            self._send({"kind": PHASE, "name": phase, "fraction": self._fraction})


def make_progress_monitor(trt: Any, phases: Phases) -> Any:
    """A trt.IProgressMonitor that fills `phases`."""

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return ProgressMonitor()
