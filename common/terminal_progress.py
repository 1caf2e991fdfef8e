"""Progress of long tasks as bars on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .progress import Advance, Report


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
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda num_bytes: bar.advance(task, num_bytes)

    @contextmanager
    def items(self, title: str, total: int) -> Iterator[Advance]:
        """A task that is a bar on the terminal, with the number of items."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def phases(self, titles: Sequence[str]) -> Iterator[Sequence[Report]]:
        """Tasks as bars below one another, each followed by its phase."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
        )
        with Progress(*columns, console=self._console) as bars:
            tasks = [bars.add_task(title, total=1.0, start=False, phase="") for title in titles]

            def report_to(task: TaskID) -> Report:
                def report(phase: str, fraction: float) -> None:
                    bars.start_task(task)
                    bars.update(task, completed=fraction, phase=phase)

                return report

            yield [report_to(task) for task in tasks]

    def note(self, line: str) -> None:
        """Prints a line on the terminal."""
        self._console.print(line, markup=False, highlight=False)
