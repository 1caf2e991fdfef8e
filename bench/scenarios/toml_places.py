"""Finds the line of a key in a TOML file, for errors: tomllib gives values without lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

Path = tuple["str | int", ...]
"""Keys and list indices from the top of the file: ("scenario", 3, "adapters", "count")."""

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")


def line_numbers(text: str) -> dict[Path, int]:
    """Line, counted from 1, of every table and of every key at the beginning of a line."""
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _resolve(_parts(header[2]), counts)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = table
            for part in _parts(key[1]):
                path = (*path, part)
                lines.setdefault(path, number)
    return lines


def line_of(path: Path, lines: dict[Path, int]) -> int | None:
    """Line of a key, or of the nearest enclosing key or table; None: the whole file."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"""[^."'\s]+|"[^"]*"|'[^']*'""", dotted)]


def _resolve(parts: Sequence[str], counts: dict[Path, int]) -> Path:
    """Path of a header. A table inside a list of tables belongs to the list's last entry."""
    path: Path = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        if position < len(parts) - 1 and path in counts:
            path = (*path, counts[path])
    return path
