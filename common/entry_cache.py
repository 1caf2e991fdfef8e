"""A cache of directories on disk. Entries appear whole or not at all, and no entry is deleted while it is used.

{key}/entry.json   description; the file's modification time is the last use
{key}/{content}/   the content
{key}.lock         locked by the process that makes or removes the entry
.{key}.*           an unfinished entry, or the remains of one after its process was killed
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from .._core import ConfigError
from .._version import __version__
from .file_lock import file_lock_if_free, not_in_use
from .json_fields import load_json_object
from .output_directory import producer_of

ENTRY_FILE: Final = "entry.json"
_KEY: Final = re.compile(r"[0-9a-f]{16}")
_UNFINISHED: Final = re.compile(r"\.([0-9a-f]{16})\.\d+\.(tmp|old)")


class CacheEntry(Protocol):
    """An entry of a cache."""

    @property
    def key(self) -> str:
        """16 hexadecimal digits."""

    @property
    def num_bytes(self) -> int:
        """Size of its files."""

    @property
    def last_used(self) -> datetime.datetime:
        """Time of its last use."""


Entry = TypeVar("Entry", bound=CacheEntry)


class EntryCache(Generic[Entry]):
    """The entries in one directory. Subclasses say what an entry holds."""

    def __init__(self, directory: Path, *, content: str, noun: str, producer: str) -> None:
        """content: name of the directory in each entry. noun: an entry in errors. producer: program that made them."""
        self.directory: Final = directory
        self._content: Final = content
        self._noun: Final = noun
        self._producer: Final = producer

    def place(self, key: str) -> Path:
        """Directory of the entry with a key, existing or not."""
        return self.directory / key

    def lock_file(self, key: str) -> Path:
        """Lock file of an entry, held by the process that makes or removes it."""
        return self.directory / f"{key}.lock"

    def find(self, key: str) -> Entry | None:
        """The entry with a key, even if it is damaged; None if there is none."""
        raise NotImplementedError

    def used_file(self, key: str) -> Path:
        """File that processes mark while they use the entry (see file_lock.py)."""
        return self.place(key) / ENTRY_FILE

    def entries(self) -> list[Entry]:
        """All entries, most recently used first."""
        keys = [path.name for path in self._children() if is_key(path.name)]
        found = [entry for key in keys if (entry := self.find(key)) is not None]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def touch(self, key: str) -> None:
        """Sets an entry's last use to now, if the cache is writable."""
        with unless_read_only():
            os.utime(self.place(key) / ENTRY_FILE)

    def remove(self, key: str) -> None:
        """Deletes an entry. Raises ConfigError if there is none, or while a process makes or uses it."""
        if not self.has(key):
            raise ConfigError(
                f"{self.directory}: has no {self._noun} with the key '{key}'; adaptrt cache lists the keys"
            )
        if not self.remove_if_unused(key):
            raise ConfigError(f"{self.place(key)}: is in use; stop the process that uses it first")

    def has(self, key: str) -> bool:
        """True if there is an entry with this key, whole or damaged."""
        return is_key(key) and self.is_of_entry(self.place(key))

    def remove_if_unused(self, key: str) -> bool:
        """Deletes an entry unless a process makes or uses it. Returns True if it was deleted."""
        with contextlib.ExitStack() as stack:
            if not stack.enter_context(file_lock_if_free(self.lock_file(key))):
                return False
            if not self.is_of_entry(self.place(key)):
                return True
            used = self.used_file(key)
            if used.is_file() and not stack.enter_context(not_in_use(used)):
                return False
            self.retire(key)
            self.lock_file(key).unlink()
            return True

    def retire(self, key: str) -> None:
        """Deletes an entry whose lock the caller holds."""
        # Rename it first, in one step, so that no process finds half an entry.
        retired = self.directory / f".{key}.{os.getpid()}.old"
        self.place(key).rename(retired)
        shutil.rmtree(retired)

    def clean_up(self) -> None:
        """Deletes leftovers of killed processes, and lock files that no process holds."""
        unfinished = {match[1] for path in self._children() if (match := _UNFINISHED.fullmatch(path.name))}
        locks = {path.stem for path in self._children() if path.suffix == ".lock" and is_key(path.stem)}
        for key in unfinished | locks:
            with file_lock_if_free(self.lock_file(key)) as is_held:
                if is_held:
                    self.remove_unfinished(key)
                    self.lock_file(key).unlink()

    def remove_unfinished(self, key: str) -> None:
        """Deletes the leftovers of an entry that was being made or removed. The caller must hold its lock."""
        for path in self._children():
            match = _UNFINISHED.fullmatch(path.name)
            if match and match[1] == key and not path.is_symlink():
                shutil.rmtree(path)

    def is_entry(self, place: Path) -> bool:
        """True if a directory is an entry with a description and its content, and contains nothing else."""
        if place.is_symlink() or not place.is_dir() or producer_of(place / ENTRY_FILE) != self._producer:
            return False
        content = place / self._content
        return {path.name for path in place.iterdir()} == {ENTRY_FILE, self._content} and not content.is_symlink()

    def is_of_entry(self, place: Path) -> bool:
        """True for an entry, even if its files are damaged or missing, that contains nothing else."""
        if place.is_symlink() or not place.is_dir():
            return False
        names = {path.name for path in place.iterdir()}
        return bool(names) and names <= {ENTRY_FILE, self._content} and not (place / self._content).is_symlink()

    def describe(self, place: Path, fields: Mapping[str, Any]) -> None:
        """Writes the description of the entry in a directory."""
        content = {"producer": {"name": self._producer, "version": __version__}, **fields}
        (place / ENTRY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def description(self, key: str) -> dict[str, Any]:
        """The fields of an entry's description; {} if it is damaged."""
        place = self.place(key)
        fields: dict[str, Any] = {}
        with contextlib.suppress(ConfigError):  # Damaged entries are still found.
            fields = load_json_object(place / ENTRY_FILE, ConfigError) if self.is_entry(place) else {}
        return fields

    def last_use(self, key: str) -> datetime.datetime:
        """Time of an entry's last use."""
        place = self.place(key)
        noted = place / ENTRY_FILE
        return datetime.datetime.fromtimestamp((noted if noted.is_file() else place).stat().st_mtime).astimezone()

    def size(self, key: str) -> int:
        """Number of bytes of an entry's files."""
        return sum(path.lstat().st_size for path in self.place(key).rglob("*") if not path.is_dir())

    def make_directory(self) -> None:
        """Creates the cache's directory, readable by this user only: models and adapters may be private.

        Raises ConfigError.
        """
        if self.directory.is_dir():
            return
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reason = f"cannot be created: {error.strerror}; set XDG_CACHE_HOME to another directory"
            raise ConfigError(f"{self.directory}: {reason}") from None

    def _children(self) -> Iterator[Path]:
        return iter(sorted(self.directory.iterdir())) if self.directory.is_dir() else iter(())


def is_key(text: str) -> bool:
    """True if a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def cache_directory(name: str) -> Path:
    """$XDG_CACHE_HOME/adaptrt/{name}, or ~/.cache/adaptrt/{name} if the variable is not set or not absolute.

    Raises ConfigError if there is no home directory either.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if stated.is_absolute():
        return stated / "adaptrt" / name
    try:
        return Path.home() / ".cache" / "adaptrt" / name
    except RuntimeError as error:
        raise ConfigError(f"cannot find the directory for the cache of {name}: {error}; set XDG_CACHE_HOME") from None


@contextlib.contextmanager
def unless_read_only() -> Iterator[None]:
    """Skips an optional write if the cache is not writable: read-only or full disk, or owned by another user."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            raise
