"""Turns names of models and adapters into local directories."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..._core import AdapterError, ConfigError
from .grammar import HubName, LocalName, parse_name
from .hub import fetch
from .kind import Kind
from .sum_of_names import parse_sum


@dataclass(frozen=True)
class Source:
    """A local directory, and the name that it comes from. It may be used like a path."""

    given: str
    """The name as the user wrote it."""
    directory: Path
    hub: HubName | None = None
    """Name in the Hub, with the commit as its revision; None for a path."""

    def __fspath__(self) -> str:
        return str(self.directory)

    def __str__(self) -> str:
        return self.given

    @property
    def label(self) -> str:
        """Short name, for example of a served model: the repository, or the last part of the path."""
        return self.directory.absolute().name if self.hub is None else self.hub.label

    @property
    def last_part(self) -> str:
        """Last part of the name: of the repository or folder, or of the path after its links are resolved."""
        return Path(os.path.realpath(self.directory)).name if self.hub is None else self.hub.label.rpartition("/")[2]

    @property
    def record(self) -> str | None:
        """The exact name with its commit, for records of what was built from it; None for a path."""
        return None if self.hub is None else str(self.hub)


def find_model(name: str | os.PathLike[str]) -> Source:
    """Returns the directory of a model, checkpoint or engine. Downloads what the cache does not have.

    A path is returned even if it does not exist; its reader reports that. Raises ConfigError.
    """
    return _find(name, Kind.MODEL)


def model_label(name: str | os.PathLike[str]) -> str:
    """Returns the label of find_model(name), and downloads nothing. Raises ConfigError."""
    if isinstance(name, Source):
        return name.label
    meaning = parse_name(name, ConfigError)
    return meaning.path.absolute().name if isinstance(meaning, LocalName) else meaning.label


def find_adapter(name: str | os.PathLike[str]) -> Source:
    """Returns the directory of an adapter, like find_model(). Raises AdapterError."""
    return _find(name, Kind.ADAPTER)


def find_sum(name: str | os.PathLike[str]) -> dict[Source, float] | None:
    """Returns the adapters and weights of a weighted sum such as "a:0.7+b:0.3"; None for other names.

    An existing path is no sum. Raises AdapterError like find_adapter(), and for an adapter that occurs twice.
    """
    named = parse_sum(name) if isinstance(name, str) and not os.path.lexists(name) else None
    if named is None:
        return None
    terms: dict[Source, float] = {}
    for term, weight in named.terms:
        source = find_adapter(term)
        if source in terms:
            raise AdapterError(f"the weighted sum '{name}' has '{term}' twice; expected each adapter once")
        terms[source] = weight
    return terms


def _find(name: str | os.PathLike[str], kind: Kind) -> Source:
    if isinstance(name, Source):
        return name
    meaning = parse_name(name, kind.error)
    given = os.fspath(name)
    if isinstance(meaning, LocalName):
        return Source(given, meaning.path)
    snapshot = fetch(meaning, kind)
    return Source(given, snapshot.directory, snapshot.name)
