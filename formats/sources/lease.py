"""Keeps downloaded files while they are used."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...common.file_lock import mark_in_use


class Lease:
    """Marks a file as used by this process until the last reference to the lease is gone.

    A pickled lease marks nothing: the process that pickled it keeps its own.
    """

    def __init__(self, file: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = mark_in_use(file)

    def release(self) -> None:
        """Ends the mark; the files may be deleted from now on."""
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the file could not be opened
            self.release()

    def __getstate__(self) -> dict[str, None]:
        return {"_file": None}


class Leases(Lease):
    """Several leases as one."""

    def __init__(self, *leases: Lease | None) -> None:
        self._file = None
        self._leases = leases

    def release(self) -> None:
        """Ends all of them."""
        for lease in self._leases:
            if lease is not None:
                lease.release()
