"""Errors in a scenario file, with line numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from adaptrt.common.json_fields import describe

from .scenario_tables import KINDS, NESTED
from .toml_places import Path, line_of


class Place:
    """The file's errors so far, and the lines of its keys."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self.problems: list[str] = []
        self._lines = lines

    def complain(self, path: Path, complaint: str) -> None:
        """Notes an error at the key `path`."""
        line = line_of(path, self._lines)
        where = "" if line is None else f"line {line}: "
        self.problems.append(f"{where}{_written(path)} {complaint}")

    def complain_of(self, error: ValidationError) -> None:
        """Notes every error that pydantic found."""
        for found in error.errors(include_url=False):
            path, table = _path_and_table(found["loc"])
            self._complain_of_one(path, table, found)

    def _complain_of_one(self, path: Path, table: tuple[str, ...], found: Mapping[str, Any]) -> None:
        match found["type"]:
            case "missing":
                self.complain(path[:-1], f"has no {path[-1]}")
            case "union_tag_not_found":
                self.complain(path, f"has no kind; expected one of {', '.join(KINDS)}")
            case "union_tag_invalid":
                self.complain((*path, "kind"), f'is "{found["ctx"]["tag"]}"; expected one of {", ".join(KINDS)}')
            case "extra_forbidden":
                self.complain(path, f"is unknown; accepted: {', '.join(_keys(table))}")
            case "value_error":
                self.complain(path, f"is {describe(found['input'])}; {found['ctx']['error']}")
            case _:
                said = found["msg"]
                self.complain(path, f"is {describe(found['input'])}: {said[0].lower()}{said[1:]}")


def _path_and_table(location: tuple[int | str, ...]) -> tuple[Path, tuple[str, ...]]:
    """Returns the path of an error, without the kind that pydantic inserts after a scenario's index, and the enclosing
    table.
    """
    if len(location) > 2 and location[0] == "scenario":
        path, kind = (*location[:2], *location[3:]), str(location[2])
        names = tuple(part for part in path[:-1] if isinstance(part, str))
        return path, (kind,) if names == ("scenario",) else names
    return location, tuple(part for part in location[:-1] if isinstance(part, str))


def _keys(table: tuple[str, ...]) -> list[str]:
    found = NESTED.get(table) or KINDS[table[0]]
    return [field.alias or name for name, field in found.model_fields.items()]


def _written(path: Path) -> str:
    """Formats a path as scenario[3].adapters.count, with lists counted from 1."""
    text = ""
    for part in path:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"
