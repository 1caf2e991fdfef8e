"""Parses Ollama's Modelfiles: the base, adapter, parameters, template, messages and licenses of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .._core import ConfigError
from ..common.regular_file import read_regular

MAX_BYTES: Final = 1 << 20
_QUOTES: Final = '"""'
_ONCE: Final = ("FROM", "ADAPTER", "TEMPLATE", "SYSTEM")
_SEVERAL: Final = ("PARAMETER", "MESSAGE", "LICENSE")
_ROLES: Final = ("system", "user", "assistant")
_STOP: Final = "stop"
"""The parameter that may be given several times."""


@dataclass
class Modelfile:
    """Content of a Modelfile. Empty texts: the instruction is missing."""

    base: str = ""
    """Value of FROM: a model's name or a path."""
    adapter: str = ""
    """Path of a directory or a file."""
    template: str = ""
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)


def read_modelfile(path: Path) -> Modelfile:
    """Reads a file. Raises ConfigError that names the file and the line."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_modelfile(text, str(path))


def parse_modelfile(text: str, source: str = "Modelfile") -> Modelfile:
    """Parses a Modelfile. source: names it in errors. Raises ConfigError that names the line."""
    made = Modelfile()
    seen: dict[str, int] = {}
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        number = place + 1
        name, _, value = lines[place].strip().partition(" ")
        place += 1
        if not name or name.startswith("#"):
            continue
        where = f"{source}, line {number}"
        name = name.upper()
        if name not in (*_ONCE, *_SEVERAL):
            raise ConfigError(f"{where}: {name[:32]} is not known; expected {', '.join((*_ONCE, *_SEVERAL))}")
        if name in _ONCE and name in seen:
            raise ConfigError(f"{where}: {name} is given again, after line {seen[name]}; expected it once")
        seen[name] = number
        first = ""
        if name in ("PARAMETER", "MESSAGE"):
            first, _, value = value.strip().partition(" ")
        # A value in quotation marks may have several lines.
        while (content := _unquoted(value.strip())) is None:
            if place == len(lines):
                raise ConfigError(f"{where}: the quotation mark of {name} is not closed")
            value = f"{value}\n{lines[place]}"
            place += 1
        if not content:
            raise ConfigError(f"{where}: {name} {first} has no value".replace("  ", " "))
        _set(made, name, first, content, where)
    if not made.base:
        raise ConfigError(f"{source}: FROM is missing; expected the base model's name or path")
    return made


def _unquoted(text: str) -> str | None:
    """Returns a value without its quotation marks; None: the closing one is missing."""
    for quote in (_QUOTES, '"'):
        if text.startswith(quote):
            is_closed = len(text) >= 2 * len(quote) and text.endswith(quote)
            return text[len(quote) : -len(quote)] if is_closed else None
    return text


def _set(made: Modelfile, name: str, first: str, value: str, where: str) -> None:
    if name == "PARAMETER":
        if first == _STOP:
            made.parameters.setdefault(_STOP, []).append(value)
        elif first in made.parameters:
            raise ConfigError(f"{where}: PARAMETER {first} is given twice; expected it once")
        else:
            made.parameters[first] = _number(value)
    elif name == "MESSAGE":
        if first not in _ROLES:
            raise ConfigError(f"{where}: MESSAGE has the role '{first[:32]}'; expected one of {', '.join(_ROLES)}")
        made.messages.append({"role": first, "content": value})
    elif name == "LICENSE":
        made.licenses.append(value)
    else:
        setattr(made, "base" if name == "FROM" else name.lower(), value)


def _number(text: str) -> Any:
    """Returns the number or the boolean that a text is, or else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) else text
