"""The demo's output: answers shown as a table while they grow, and tables of counters."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.color import Color
from rich.console import Console
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from PIL.Image import Image

# Minimum time that a terminal shows each step; a tiny model writes faster than people read.
SECONDS_PER_FRAME = 0.04


@dataclass
class Row:
    """One request of the batch."""

    name: str
    kind: str
    text: str = ""
    tokens: int = 0
    done: bool = False


class AnswerTable:
    """The rows of a batch: redrawn on a terminal, printed once elsewhere."""

    def __init__(self, console: Console, title: str, rows: Iterable[Row]) -> None:
        self._console = console
        self._title = title
        self._rows = list(rows)
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the table during the with statement, and leaves its last state on the screen."""
        if not self._console.is_terminal:
            yield
            self._console.print(self._title, markup=False, soft_wrap=True)
            name, kind = max(len(row.name) for row in self._rows), max(len(row.kind) for row in self._rows)
            for row in self._rows:
                self._console.print(
                    f"  {row.name:<{name}}  {row.kind:<{kind}}  {row.text}", markup=False, soft_wrap=True
                )
            return
        with Live(self._table(), console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def refresh(self) -> None:
        """Redraws the rows."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            time.sleep(SECONDS_PER_FRAME)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", title_style="bold", expand=True)
        table.add_column("adapter", style="cyan", no_wrap=True)
        table.add_column("kind", style="dim", no_wrap=True)
        table.add_column("answer", ratio=1)
        table.add_column("tokens", justify="right")
        for row in self._rows:
            cursor = "" if row.done else " ▌"
            table.add_row(row.name, row.kind, Text(row.text + cursor), str(row.tokens))
        return table


def half_blocks(picture: Image, width: int) -> Text:
    """Returns a picture as text, `width` columns wide. A character shows two pixels, one above the other."""
    height = max(round(picture.height * width / picture.width / 2), 1)
    rows = np.asarray(picture.convert("RGB").resize((width, 2 * height))).tolist()
    lines = []
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        line = Text()
        for above, below in zip(upper, lower, strict=True):
            line.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        lines.append(line)
    return Text("\n").join(lines)


def command_lines(program: str, words: Iterable[str], width: int) -> list[str]:
    """A command in lines for copying: broken before flags if a line would exceed `width`."""
    parts = [program]
    for word in map(shlex.quote, words):
        if word.startswith("-"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len("  \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {part}")
    return lines


def values_table(
    title: str, columns: Mapping[str, Mapping[str, str]], *, first: str, justify: Literal["left", "right"] = "right"
) -> Table:
    """Table of texts by name; `first` is the title of the names' column."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, style="cyan")
    for name in columns:
        table.add_column(name, justify=justify)
    names = dict.fromkeys(name for values in columns.values() for name in values)
    for name in names:
        table.add_row(name, *(values.get(name, "") for values in columns.values()))
    return table
