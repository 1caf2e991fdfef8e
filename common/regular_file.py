"""Reads regular files safely: rejects FIFOs and devices, and files that another process writes at the same time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

FileVersion: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size in bytes, and modification time in ns."""

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[io.FileIO]:
    """Opens a file for reading, unbuffered and without blocking, and checks at the end that no process changed it.

    If a rename replaces the file at the path meanwhile, the open file stays the old one, which is no error.

    Raises OSError if the path cannot be opened, or if it is a directory, a FIFO, a socket or a device. Raises OSError
    at the end of the with statement if the file was written while it was open.
    """
    # Opening a device can have side effects, so the path is checked first.
    file_version(path)
    # Without O_NONBLOCK, opening a FIFO would wait for a writer. Regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with io.FileIO(descriptor) as file:
        before = _version_of(os.fstat(descriptor), path)
        yield file
        if _version_of(os.fstat(descriptor), path) != before:
            raise OSError(errno.EBUSY, "it was changed while it was read; try again when it is complete", str(path))


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file, opened with open_regular().

    Raises OSError as open_regular(), and, without reading, for a file of more than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes; expected at most {max_bytes}", str(path))
        content = file.read(size)
        if len(content) != size:
            raise _cut(path, size - len(content))
    return content


def read_into(file: io.FileIO, path: Path, place: memoryview) -> None:
    """Fills `place` with the next bytes of `file`, whose name is `path`. Raises OSError if the file ends first."""
    rest = place
    while rest.nbytes:
        count = file.readinto(rest)
        if not count:
            raise _cut(path, rest.nbytes)
        rest = rest[count:]


def read_at(file: io.FileIO, path: Path, place: memoryview, offset: int) -> None:
    """Fills `place` with the bytes of `file` from `offset` on. Several threads may read one file.

    Raises OSError if the file ends first.
    """
    rest = place
    while rest.nbytes:
        count = os.preadv(file.fileno(), [rest], offset)
        if not count:
            raise _cut(path, rest.nbytes)
        rest, offset = rest[count:], offset + count


def file_version(path: Path) -> FileVersion:
    """Identifies a version of a file: it changes if the file is written or replaced. Raises OSError unless the file is
    regular."""
    return _version_of(path.stat(), path)


def _cut(path: Path, missing_bytes: int) -> OSError:
    return OSError(
        errno.EBUSY, f"it ends {missing_bytes} bytes before its size; it was truncated while it was read", str(path)
    )


def _version_of(status: os.stat_result, path: Path) -> FileVersion:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}; expected a regular file", str(path))
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
