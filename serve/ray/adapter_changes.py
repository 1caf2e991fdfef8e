"""Changes of adapters (load, replace, unload) while replicas run, in one order for all replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from ...runtime.adapter_versions import VersionLimits
from ..errors import ApiError, retry_headers

Files = tuple[tuple[str, bytes], ...]
"""Names and bytes of files."""
SECONDS_TO_REMEMBER_UNLOADS: Final = 3600.0
"""Time after which the log forgets that an adapter was unloaded, unless replicas start with that adapter. By then, all
replicas have applied the change or ended.
"""


@dataclass(frozen=True)
class AdapterChange:
    """A change of the adapter that a name stands for."""

    name: str
    path: str | None
    """The adapter's directory; None: the adapter is unloaded, or was sent."""
    replace: bool = False
    """True: an adapter that has the name already is replaced."""
    pinned: bool = False
    is_initial: bool = False
    """True: replicas start with an adapter of this name."""
    number: int = 0
    """Position in the order of all changes, from 1."""
    made: float = field(default_factory=time.time)
    """Time of the change, in seconds since the epoch."""
    digest: str | None = None
    """Digest of an adapter that a client has sent; None: the adapter has a path, or is unloaded."""
    files: Files = field(default=(), repr=False)
    """Names and bytes of its files, in a check and in the coordinator's log. Replicas store the files, and get changes
    without them."""

    @property
    def is_unload(self) -> bool:
        """True if the adapter is removed."""
        return self.path is None and self.digest is None

    def without_files(self) -> AdapterChange:
        """Returns the change without the files of a sent adapter."""
        return replace(self, files=())

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(len(content) for _, content in self.files)


@dataclass(frozen=True)
class Refusal:
    """An ApiError that is sent to another process."""

    message: str
    status: int
    kind: str
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        """Copies an error."""
        return cls(str(error), int(error.status), error.kind, error.param)

    def error(self, beginning: str = "") -> ApiError:
        """Returns the error again; `beginning` is put before its message."""
        status = HTTPStatus(self.status)
        return ApiError(
            beginning + self.message, status=status, kind=self.kind, param=self.param, headers=retry_headers(status)
        )


@dataclass(frozen=True)
class Outcome:
    """One replica's answer to a change."""

    replica: str
    refusal: Refusal | None = None
    was_known: bool = False
    """True: the replica had an adapter of this name."""


class ChangeLog:
    """The newest change of each name, and loads whose adapters may be old versions.

    Applying only these, in order, has the same result as applying all changes.
    """

    def __init__(self, limits: VersionLimits | None = None) -> None:
        """Makes an empty log. limits: of the old versions that it keeps; None: the defaults."""
        self._limits = VersionLimits() if limits is None else limits
        self._changes: list[AdapterChange] = []
        self.number = 0
        """Number of the newest change."""

    @property
    def changes(self) -> tuple[AdapterChange, ...]:
        """All changes in order."""
        return self.since(0)

    def since(self, number: int) -> tuple[AdapterChange, ...]:
        """Returns the changes after the change of this number, in order."""
        return tuple(change for change in self._changes if change.number > number)

    def files(self, digest: str) -> Files:
        """Returns the files of a sent adapter; empty if the log has no such change any more."""
        return next((change.files for change in self._changes if change.digest == digest and change.files), ())

    def add(self, change: AdapterChange) -> None:
        """Adds the newest change. Forgets unloads that are older than SECONDS_TO_REMEMBER_UNLOADS, and the oldest
        loads of versions above the limits.
        """
        self.number = change.number
        oldest = change.made - SECONDS_TO_REMEMBER_UNLOADS
        kept = [old for old in self._changes if not self._ends(old, change) and not _is_forgettable(old, oldest)]
        self._changes = [*kept, change]
        newest = {one.name: one.number for one in self._changes}
        old_loads = [one for one in self._changes if one.number != newest[one.name]]
        num_bytes = sum(one.num_bytes for one in old_loads)
        while len(old_loads) > self._limits.max_versions or (old_loads and num_bytes > self._limits.max_bytes):
            ended = old_loads.pop(0)
            num_bytes -= ended.num_bytes
            self._changes.remove(ended)

    @staticmethod
    def _ends(old: AdapterChange, change: AdapterChange) -> bool:
        """True if no replica has an adapter of the old change after the new one."""
        if old.name != change.name:
            return False
        is_same = (old.path, old.digest) == (change.path, change.digest)
        return change.is_unload or old.is_unload or is_same

    def adopt(self, changes: Iterable[AdapterChange]) -> None:
        """Takes over the changes of a log that has more of them."""
        self._changes = list(changes)
        self.number = max((change.number for change in self._changes), default=0)


def refusal_of(outcomes: Mapping[str, Refusal | None]) -> Refusal | None:
    """Returns the refusal that clients get, or None. outcomes: by replica, its refusal or None."""
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
    return change.is_unload and not change.is_initial and change.made < oldest
