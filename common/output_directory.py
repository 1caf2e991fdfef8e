"""Writes a directory that appears complete or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .._core import AdaptrtError

_HERE: Final = -100
"""AT_FDCWD: paths are relative to the working directory."""
_EXCHANGE: Final = 2
"""RENAME_EXCHANGE."""


@contextlib.contextmanager
def replaced_directory(
    target: Path, *, is_ours: Callable[[Path], bool], kind: str, error: type[AdaptrtError]
) -> Iterator[Path]:
    """Yields a new directory next to `target`, which replaces `target` if the with statement ends without an error.

    `target` may be absent or empty, or a directory for which is_ours() holds. Anything else is rejected with `error`,
    in which `kind` says what is accepted.
    """
    target = replaceable(target, is_ours=is_ours, kind=kind, error=error)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as reason:
        raise error(f"{target}: cannot be written: {reason.strerror}") from None
    try:
        yield temporary
        _replace(target, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replaceable(target: Path, *, is_ours: Callable[[Path], bool], kind: str, error: type[AdaptrtError]) -> Path:
    """The target with links resolved, after replaced_directory()'s checks. Call it to fail before work is done."""
    target = Path(os.path.realpath(target))  # realpath stops at a loop of links; resolve() fails.
    if os.path.lexists(target) and not target.is_dir():
        raise error(f"{target}: exists and is not a directory")
    if target.is_dir() and any(target.iterdir()) and not is_ours(target):
        raise error(f"{target}: is neither empty nor {kind}; nothing was written")
    return target


def holds_only(
    directory: Path, names: Callable[[str], bool], directories: Callable[[Path], bool] = lambda _: False
) -> bool:
    """True if every entry of a directory is a plain file whose name is accepted, or a directory that is accepted."""
    return all(
        (entry.is_file() and not entry.is_symlink() and names(entry.name)) or directories(entry)
        for entry in directory.iterdir()
    )


def producer_of(config_file: Path) -> str | None:
    """The producer's name in a config.json; None if there is none, or the file cannot be read."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        return str(config["producer"]["name"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _replace(target: Path, temporary: Path) -> None:
    """Renames `temporary` to `target`. If another process does the same at this moment, it tries again: the last one
    wins.

    An existing directory gets the name `temporary`. Both names are exchanged in one step, so a process that is killed
    here loses neither. Only on file systems that cannot exchange names, the old directory is moved away first.
    """
    while True:
        try:
            temporary.rename(target)  # This also replaces an empty directory.
            return
        except OSError as reason:
            if reason.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):  # Another process has just moved it away.
            if _exchange(temporary, target):
                return
            retired = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(retired)
            shutil.rmtree(retired)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two files in one step. Returns False if the system or the file system cannot.

    Raises FileNotFoundError if one of them is missing, OSError for other reasons.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # A Linux call that Python does not wrap.
    if renameat2 is None:
        return False
    if renameat2(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
