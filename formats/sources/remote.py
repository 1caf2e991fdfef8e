"""Stores that hold adapters and models elsewhere, as downloads.py sees them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...common.progress import Advance
from .grammar import HubName, ObjectName
from .kind import Kind


class DownloadStoppedError(Exception):
    """A download was stopped because nothing waits for it any more."""


@dataclass(frozen=True)
class Watch:
    """Follows a download, and may stop it."""

    advance: Advance
    """Called with the number of bytes that were written since the last call."""
    stop: threading.Event | None = None

    def check(self) -> None:
        """Raises DownloadStoppedError if the download shall stop."""
        if self.stop is not None and self.stop.is_set():
            raise DownloadStoppedError


@dataclass(frozen=True)
class Listing:
    """The files of a directory in a store."""

    version: str
    """Changes if any file changes: the commit, or a digest of the files' sizes and ETags."""
    files: dict[str, int]
    """Size in bytes of each file, by its path in the directory."""


class Remote(Protocol):
    """One directory in a store."""

    @property
    def name(self) -> HubName | ObjectName:
        """Name of the directory."""

    @property
    def kind(self) -> Kind:
        """Kind of the directory; it decides which files are needed."""

    def listing(self) -> Listing | None:
        """Lists the directory; None if it has no config file of this kind. Raises one of `failures`."""

    def fetch(self, file: str, target: Path, watch: Watch) -> None:
        """Writes a file of the listing to `target`. Checks size and digest.

        Raises one of `failures`, AdaptrtError, and DownloadStoppedError.
        """

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """Errors of requests to the store."""

    def explain(self, error: BaseException) -> str:
        """Says why a request failed, and what the user can do."""

    def is_unreachable(self, error: BaseException) -> bool:
        """True if the store gave no answer, so that an earlier copy may be used."""
