"""What a name of an adapter means: a PEFT directory with the files that it had then, or a weighted sum of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, SupportsIndex

from .._core import AdapterError, EngineError
from ..formats.adapter.adapter_copy import adapter_checksum
from .adapter_facts import AdapterFacts
from .engine import LoadedEngine

FIRST_NAMED_TASK_ID: Final = 1 << 63
"""Named adapters have this task_id and those that follow; the ids below are the caller's."""


def refuse_named_task_id(task_id: object, field: str) -> None:
    """Raises AdapterError for an id of named adapters, where a caller gives one. `field` says where it stands.

    Anything but an integer is left to those that use it.
    """
    if isinstance(task_id, SupportsIndex) and task_id.__index__() >= FIRST_NAMED_TASK_ID:
        raise AdapterError(
            f"{field} is {task_id}; expected less than {FIRST_NAMED_TASK_ID}: the ids from there on are those of "
            "adapters that have names"
        )


class UnknownAdapterError(AdapterError):
    """No adapter has the name that a request asks for. The message names the engine and other adapters."""

    def __init__(self, message: str, name: str = "") -> None:
        """`name`: the name that no adapter has."""
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class NamedAdapter:
    """A PEFT adapter that requests ask for by its name."""

    name: str
    task_id: int
    directory: Path
    checksum: str
    """adapter_checksum() of the directory when the adapter got its name."""
    created: int = field(default=0, compare=False)
    """Time when the adapter got its name, in seconds since the epoch."""
    facts: AdapterFacts = field(default_factory=AdapterFacts, compare=False, repr=False)

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """Itself."""
        return (self,)


@dataclass(frozen=True)
class AdapterSum:
    """A weighted sum of adapters, as long as they are those that their names meant."""

    task_id: int
    terms: tuple[tuple[NamedAdapter, float], ...]

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """Of the terms."""
        return tuple(adapter for adapter, _ in self.terms)

    @property
    def directory(self) -> Path:
        """Of the first term, whose chat template the sum's chats are written with."""
        return self.terms[0][0].directory


def check_unchanged(adapter: NamedAdapter, engine: LoadedEngine) -> None:
    """Raises EngineError where the adapter's files are not those that its name was given to, or cannot be read."""
    if checksum_of(adapter.name, adapter.directory) == adapter.checksum:
        return
    if adapter.directory == engine.adapters.get(adapter.name):
        since = "after the build. Build the engine again"
    else:
        since = "after it was added. Add it again with replace"
    raise EngineError(f"{adapter.directory}: adapter '{adapter.name}' was changed {since}")


def checksum_of(name: str, directory: Path) -> str:
    """adapter_checksum() of the adapter's directory. Raises EngineError for files that cannot be read."""
    try:
        return adapter_checksum(directory)
    except OSError as error:
        raise EngineError(f"{directory}: adapter '{name}' cannot be read: {error}") from error
