"""How a long task tells how far it is: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

Advance = Callable[[int], None]
"""Says how many more bytes are done; may be called from several threads."""

_SECONDS_BETWEEN_LINES: Final = 5.0


class Progress(Protocol):
    """Where tasks report to."""

    def task(self, title: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """A task that reports its bytes until the with statement ends."""


class SilentProgress:
    """Reports nothing."""

    @contextmanager
    def task(self, title: str, total_bytes: int) -> Iterator[Advance]:
        """A task that reports nothing."""
        yield lambda num_bytes: None


class TerminalProgress:
    """Draws a bar with rate and remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def task(self, title: str, total_bytes: int) -> Iterator[Advance]:
        """A task that is a bar on the terminal."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda num_bytes: bar.advance(task, num_bytes)


class LineProgress:
    """Writes a line when a task begins and ends, and now and then between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def task(self, title: str, total_bytes: int) -> Iterator[Advance]:
        """A task that is lines of text."""
        lock = Lock()
        began = time.monotonic()
        done = 0
        last_line = began

        def advance(num_bytes: int) -> None:
            nonlocal done, last_line
            with lock:
                done += num_bytes
                now = time.monotonic()
                if now - last_line >= _SECONDS_BETWEEN_LINES:
                    last_line = now
                    self._write(f"{title}: {format_bytes(done)} of {format_bytes(total_bytes)}")

        self._write(f"{title}: {format_bytes(total_bytes)}")
        yield advance
        self._write(f"{title}: done in {time.monotonic() - began:.1f} s")

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def progress_on(stream: TextIO | None = None) -> Progress:
    """A bar when `stream` (None: what sys.stderr is now) is a terminal, lines otherwise."""
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    return TerminalProgress(console) if console.is_terminal else LineProgress(stream)


def format_bytes(num_bytes: int) -> str:
    """A size as people read it: 1.5 GiB."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
