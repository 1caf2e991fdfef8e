"""Adapters that are loaded, swapped and unloaded while replicas run: one order of changes, for all replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from ..errors import ApiError, retry_headers

SECONDS_TO_REMEMBER_UNLOADS: Final = 3600.0
"""Of adapters that no replica starts with: whoever has not heard of an unload by then does not run any more."""


@dataclass(frozen=True)
class AdapterChange:
    """What a name means from now on."""

    name: str
    path: str | None
    """The adapter's directory; None: there is no adapter of this name any more."""
    replace: bool = False
    """A name that is known already may be given to another adapter."""
    pinned: bool = False
    is_initial: bool = False
    """Replicas start with an adapter of this name."""
    number: int = 0
    """In the order of all changes, from 1."""
    made: float = field(default_factory=time.time)
    """In seconds since the epoch."""


@dataclass(frozen=True)
class Refusal:
    """An ApiError on its way to another process."""

    message: str
    status: int
    kind: str
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        """What the error says."""
        return cls(str(error), int(error.status), error.kind, error.param)

    def error(self, beginning: str = "") -> ApiError:
        """The error again; `beginning` goes before what it says."""
        status = HTTPStatus(self.status)
        return ApiError(
            beginning + self.message, status=status, kind=self.kind, param=self.param, headers=retry_headers(status)
        )


@dataclass(frozen=True)
class Outcome:
    """What one replica says of a change."""

    replica: str
    refusal: Refusal | None = None
    was_known: bool = False
    """There was an adapter of this name."""


class ChangeLog:
    """The newest change of each name. Following these in their order gives what following all changes gives."""

    def __init__(self) -> None:
        """No changes."""
        self._changes: dict[str, AdapterChange] = {}
        self.number = 0
        """Of the newest change."""

    @property
    def changes(self) -> tuple[AdapterChange, ...]:
        """In their order."""
        return self.since(0)

    def since(self, number: int) -> tuple[AdapterChange, ...]:
        """Those that came after the change of this number, in their order."""
        return tuple(change for change in self._changes.values() if change.number > number)

    def add(self, change: AdapterChange) -> None:
        """The newest; unloads that nobody needs to hear of any more are forgotten."""
        # The order of the dict is that of the changes.
        self._changes.pop(change.name, None)
        self._changes[change.name] = change
        self.number = change.number
        oldest = change.made - SECONDS_TO_REMEMBER_UNLOADS
        for name in [name for name, old in self._changes.items() if _is_forgettable(old, oldest)]:
            del self._changes[name]

    def adopt(self, changes: Iterable[AdapterChange]) -> None:
        """Those of a log that knows more."""
        self._changes = {change.name: change for change in changes}
        self.number = max((change.number for change in self._changes.values()), default=0)


def refusal_of(outcomes: Mapping[str, Refusal | None]) -> Refusal | None:
    """What is answered when replicas, by their names, refuse a change; None when none does."""
    refusals = {replica: refusal for replica, refusal in outcomes.items() if refusal is not None}
    if not refusals:
        return None
    replica, first = next(iter(refusals.items()))
    if len(refusals) == len(outcomes):
        return first
    others = len(outcomes) - len(refusals)
    said = f"replica {replica} refuses what {others} of {len(outcomes)} replicas would do: {first.message}"
    return Refusal(said, first.status, first.kind, first.param)


def _is_forgettable(change: AdapterChange, oldest: float) -> bool:
    return change.path is None and not change.is_initial and change.made < oldest
