"""What TensorRT logs and how far it says it is, passed on to the parent."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from .messages import LOG, PHASE

Send = Callable[[dict[str, Any]], None]

_SECONDS_BETWEEN_PHASES: Final = 0.1
# Verbose messages that are kept to see which node TensorRT spoke of last.
_KEPT: Final = 64
# How the list of a plan's layers begins.
_LAYERS: Final = "Engine Layer Information:"


class Log:
    """What was logged; make_logger() connects it to TensorRT."""

    def __init__(self, send: Send) -> None:
        """`send` gets everything but verbose messages as it comes."""
        self._send = send
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self.errors: list[str] = []
        self.layers = ""
        """TensorRT's description of the layers of the plan it built."""

    def add(self, severity: str, text: str) -> None:
        """Takes a message of TensorRT's."""
        if severity == "VERBOSE":
            self._recent.append(text)
            if text.startswith(_LAYERS):
                self.layers = text
            return
        if severity in ("ERROR", "INTERNAL_ERROR") and text not in self.errors:
            self.errors.append(text)
        self._send({"kind": LOG, "severity": severity, "text": text})

    def last_node(self, operators: Mapping[str, str]) -> str | None:
        """The node of the network that the last verbose messages named."""
        for text in reversed(self._recent):
            found = nodes_named(text, operators)
            if found:
                return found[-1]
        return None


def nodes_named(text: str, operators: Mapping[str, str]) -> list[str]:
    """The nodes of the network whose names occur in a message."""
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
    """How far a build is, from phases that contain phases; make_progress_monitor() connects it to TensorRT.

    TensorRT does not say beforehand which phases there will be. A phase counts for the step of the phase around it in
    which it runs, so the fraction grows, but not evenly.
    """

    def __init__(self, send: Send, every_step: Callable[[], None]) -> None:
        """`every_step` is called after each step of each phase."""
        self._send = send
        self._every_step = every_step
        self._running: dict[str, tuple[int, int]] = {}  # steps done and steps, the outermost phase first
        self._fraction = 0.0
        self._last_sent = 0.0

    def start(self, phase: str, num_steps: int) -> None:
        """A phase begins, within those that run; one that is announced without steps counts as having one."""
        self._running[phase] = (0, max(num_steps, 1))
        self._tell(phase)

    def step(self, phase: str, step: int) -> None:
        """Step `step` of a phase, counted from 0, is done."""
        if phase in self._running:
            _, num_steps = self._running[phase]
            self._running[phase] = (min(step + 1, num_steps), num_steps)
        self._every_step()
        self._tell(phase)

    def finish(self, phase: str) -> None:
        """A phase ends."""
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
