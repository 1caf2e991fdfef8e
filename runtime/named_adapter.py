"""An adapter's name stands for a PEFT directory with the files that it had when it was added, or for a weighted sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, SupportsIndex

from .._core import AdapterError, EngineError
from ..formats.adapter.adapter_copy import adapter_checksum, adapter_digests
from ..formats.sources.lease import Lease
from .adapter_facts import AdapterFacts
from .engine import LoadedEngine

FIRST_NAMED_TASK_ID: Final = 1 << 63
"""First task_id of named adapters. Lower ids belong to callers."""


def refuse_named_task_id(task_id: object, field: str) -> None:
    """Raises AdapterError if a caller gives a task_id that is reserved for named adapters. field: names the id in
    errors.

    Ignores values that are not integers; later checks reject them.
    """
    if isinstance(task_id, SupportsIndex) and task_id.__index__() >= FIRST_NAMED_TASK_ID:
        raise AdapterError(
            f"{field} is {task_id}; expected less than {FIRST_NAMED_TASK_ID}: higher ids are reserved for "
            "adapters with names"
        )


class UnknownAdapterError(AdapterError):
    """No adapter has the requested name. The message names the engine and other adapters."""

    def __init__(self, message: str, name: str = "") -> None:
        """name: the requested name."""
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class NamedAdapter:
    """A PEFT adapter that requests name."""

    name: str
    task_id: int
    directory: Path
    checksum: str
    """adapter_checksum() of the directory when the adapter was added."""
    created: int = field(default=0, compare=False)
    """Time when the adapter was added, in seconds since the epoch."""
    facts: AdapterFacts = field(default_factory=AdapterFacts, compare=False, repr=False)
    lease: Lease | None = field(default=None, compare=False, repr=False)
    """Keeps files as long as requests can ask for the adapter."""

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """A tuple with only this adapter."""
        return (self,)


@dataclass(frozen=True)
class AdapterSum:
    """A weighted sum of adapters. It is valid as long as their names stand for the same adapters."""

    task_id: int
    terms: tuple[tuple[NamedAdapter, float], ...]

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """The adapters of the terms."""
        return tuple(adapter for adapter, _ in self.terms)

    @property
    def directory(self) -> Path:
        """Directory of the first term, whose chat template the sum uses."""
        return self.terms[0][0].directory


def check_unchanged(adapter: NamedAdapter, engine: LoadedEngine) -> None:
    """Raises EngineError if the adapter's files have changed since it was added, or cannot be read."""
    _check_checksum(checksum_of(adapter.name, adapter.directory), adapter, engine)


def read_digest(adapter: NamedAdapter, engine: LoadedEngine) -> None:
    """Reads the digest and the size of the adapter's files into its facts. Raises like check_unchanged()."""
    checksum, digest, num_bytes = digests_of(adapter.name, adapter.directory)
    _check_checksum(checksum, adapter, engine)
    adapter.facts.digest, adapter.facts.num_bytes = digest, num_bytes


def checksum_of(name: str, directory: Path) -> str:
    """Returns adapter_checksum() of the adapter's directory. Raises EngineError for files that cannot be read."""
    with _reading(name, directory):
        return adapter_checksum(directory)


def digests_of(name: str, directory: Path) -> tuple[str, str, int]:
    """Returns adapter_digests() of the adapter's directory. Raises EngineError for files that cannot be read."""
    with _reading(name, directory):
        return adapter_digests(directory)


@contextlib.contextmanager
def _reading(name: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"{directory}: adapter '{name}' cannot be read: {error}") from error


def _check_checksum(checksum: str, adapter: NamedAdapter, engine: LoadedEngine) -> None:
    if checksum == adapter.checksum:
        return
    if adapter.directory == engine.adapters.get(adapter.name):
        since = "after the build. Build the engine again"
    else:
        since = "after it was added. Add it again with replace"
    raise EngineError(f"{adapter.directory}: adapter '{adapter.name}' was changed {since}")
