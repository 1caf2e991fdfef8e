"""Progress of long tasks: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Final, Protocol, TextIO

Advance = Callable[[int], None]
"""Adds to the number of bytes or items that are done; may be called from several threads."""

Report = Callable[[str, float], None]
"""Reports a task's phase and its completed fraction; 1 once, at the end. Called by the task's own thread."""

_SECONDS_BETWEEN_LINES: Final = 5.0


class Progress(Protocol):
    """Interface for progress reports."""

    def task(self, title: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """Starts a task that reports bytes until the with statement ends."""

    def items(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Starts a task that reports items until the with statement ends."""

    def phases(self, titles: Sequence[str]) -> AbstractContextManager[Sequence[Report]]:
        """Starts parallel tasks, each of which reports phases until the with statement ends."""

    def note(self, line: str) -> None:
        """Shows a message to the waiting user."""


class SilentProgress:
    """Reports nothing."""

    @contextmanager
    def task(self, title: str, total_bytes: int) -> Iterator[Advance]:
        """A task that reports nothing."""
        yield lambda num_bytes: None

    @contextmanager
    def items(self, title: str, total: int) -> Iterator[Advance]:
        """Starts a task that reports nothing."""
        yield lambda count: None

    @contextmanager
    def phases(self, titles: Sequence[str]) -> Iterator[Sequence[Report]]:
        """Tasks that report nothing."""
        yield [lambda phase, fraction: None for _ in titles]

    def note(self, line: str) -> None:
        """Says nothing."""


class LineProgress:
    """Writes a line when a task begins and ends, and sometimes in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def task(self, title: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """A task that is lines of text."""
        return self._counted(title, total_bytes, format_bytes)

    def items(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """A task that is lines of text, with the number of items."""
        return self._counted(title, total, str)

    @contextmanager
    def _counted(self, title: str, total: int, text_of: Callable[[int], str]) -> Iterator[Advance]:
        lines = _SparseLines(self._write)
        lock = Lock()
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                lines.write(f"{title}: {text_of(done)} of {text_of(total)}")

        self._write(f"{title}: {text_of(total)}")
        yield advance
        self._write(f"{title}: done in {lines.seconds:.1f} s")

    @contextmanager
    def phases(self, titles: Sequence[str]) -> Iterator[Sequence[Report]]:
        """Tasks as lines with the task, the phase and the percentage."""

        def report_to(title: str) -> Report:
            lines: _SparseLines | None = None

            def report(phase: str, fraction: float) -> None:
                nonlocal lines
                if lines is None:
                    lines = _SparseLines(self._write)
                    self._write(title)
                if fraction < 1.0:
                    lines.write(f"{title}: {fraction:.0%}, {phase}")
                else:
                    self._write(f"{title}: done in {lines.seconds:.1f} s")

            return report

        yield [report_to(title) for title in titles]

    def note(self, line: str) -> None:
        """Writes a line."""
        self._write(line)

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class _SparseLines:
    """Writes a line only if the last one was some time ago."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._began = self._last_line = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it was created."""
        return time.monotonic() - self._began

    def write(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._write(line)


def progress_on(stream: TextIO | None = None) -> Progress:
    """A bar if `stream` (None: the current sys.stderr) is a terminal, lines otherwise."""
    # Imported here, because processes that only load engines need no rich.
    from rich.console import Console

    from .terminal_progress import TerminalProgress

    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    return TerminalProgress(console) if console.is_terminal else LineProgress(stream)


def format_bytes(num_bytes: int) -> str:
    """A size for people to read, such as 1.5 GiB."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
