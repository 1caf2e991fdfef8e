"""Locks between processes. A lock ends with the process that holds it, even if that process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def file_lock(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock file during a with statement, and creates it if it does not exist.

    on_wait: called once before waiting, if another process holds the lock.

    Raises OSError.
    """
    descriptor = None
    while descriptor is None:
        descriptor = _lock(path, on_wait)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock_if_free(path: Path) -> Iterator[bool]:
    """Like file_lock, but does not wait. Yields True if the lock is held."""

    def give_up() -> None:
        raise BlockingIOError

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, on_wait=give_up))
        except BlockingIOError:
            is_held = False
        else:
            is_held = True
        yield is_held


def mark_in_use(path: Path) -> BinaryIO | None:
    """An open file that marks the file at `path` as used by this process until it is closed; see not_in_use().

    None on file systems without locks, or if another process is about to delete the file. Raises OSError if the file
    cannot be opened.
    """
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def not_in_use(path: Path) -> Iterator[bool]:
    """Yields True if no process has marked a file as in use; then none can do so during the with statement."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _lock(path: Path, on_wait: Callable[[], None]) -> int | None:
    """The locked file; None if it was deleted meanwhile, because other processes then lock a new file of this name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
