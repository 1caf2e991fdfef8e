"""The cache of engines: a directory of entries, each an engine and its description.

engines/{key}/engine/      the engine directory
engines/{key}/entry.json   its source and options; the file's modification time is the last use
engines/{key}.lock         locked by the process that makes or removes the entry
engines/.{key}.*           an unfinished entry, or the remains of one after its process was killed
engines/digests/           digests of model directories, see model_digest.py
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError
from ..._version import __version__
from ...common.file_lock import file_lock_if_free, not_in_use
from ...common.json_fields import load_json_object
from ...common.output_directory import producer_of
from ...formats.checkpoint.config import CONFIG_FILE, PRODUCER
from ...formats.engine.engine_config import engine_file

ENTRY_FILE: Final = "entry.json"
ENGINE_DIRECTORY: Final = "engine"
DIGESTS_DIRECTORY: Final = "digests"
_KEY: Final = re.compile(r"[0-9a-f]{16}")
_UNFINISHED: Final = re.compile(r"\.([0-9a-f]{16})\.\d+\.(tmp|old)")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}(\.\d+\.tmp)?")


@dataclass(frozen=True)
class CachedEngine:
    """An entry of the cache."""

    key: str
    directory: Path
    """Directory of the engine."""
    model: str
    """Model that it was built from: a directory, or a name of the Hub with the commit."""
    options: str
    """Description of its options, for the user."""
    num_bytes: int
    last_used: datetime.datetime


class EngineCache:
    """The entries in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: default_cache_directory(). Reads and creates nothing yet."""
        self.directory: Final = default_cache_directory() if directory is None else directory

    def place(self, key: str) -> Path:
        """Directory of the entry with a key, existing or not."""
        return self.directory / key

    def lock_file(self, key: str) -> Path:
        """Lock file of an entry, held by the process that makes or removes it."""
        return self.directory / f"{key}.lock"

    def find(self, key: str) -> CachedEngine | None:
        """The entry with a key, even if it is damaged; None if there is none."""
        place = self.place(key)
        if not is_of_entry(place):
            return None
        fields: dict[str, Any] = {}
        with contextlib.suppress(ConfigError):  # Damaged entries are still found.
            fields = load_json_object(place / ENTRY_FILE, ConfigError) if is_entry(place) else {}
        model, options = fields.get("model"), fields.get("options")
        if not isinstance(model, str) or not isinstance(options, str):
            model, options = "not known", "damaged"
        noted = place / ENTRY_FILE
        used = datetime.datetime.fromtimestamp((noted if noted.is_file() else place).stat().st_mtime).astimezone()
        return CachedEngine(key, place / ENGINE_DIRECTORY, model, options, _size(place), used)

    def entries(self) -> list[CachedEngine]:
        """All entries, most recently used first."""
        keys = [path.name for path in self._children() if _KEY.fullmatch(path.name)]
        found = [entry for key in keys if (entry := self.find(key)) is not None]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def touch(self, key: str) -> None:
        """Sets an entry's last use to now, if the cache is writable."""
        with unless_read_only():
            os.utime(self.place(key) / ENTRY_FILE)

    def remove(self, key: str) -> None:
        """Deletes an entry. Raises ConfigError if there is none, or while a process makes or uses it."""
        if not _KEY.fullmatch(key) or not is_of_entry(self.place(key)):
            raise ConfigError(f"{self.directory}: has no engine with the key '{key}'; adaptrt cache lists the keys")
        if not self.remove_if_unused(key):
            raise ConfigError(f"{self.place(key)}: is in use; stop the process that uses it first")

    def remove_if_unused(self, key: str) -> bool:
        """Deletes an entry unless a process makes or uses it. Returns True if it was deleted."""
        with contextlib.ExitStack() as stack:
            if not stack.enter_context(file_lock_if_free(self.lock_file(key))):
                return False
            place = self.place(key)
            if not is_of_entry(place):
                return True
            engine = place / ENGINE_DIRECTORY / engine_file(0)
            if engine.is_file() and not stack.enter_context(not_in_use(engine)):
                return False
            # Rename it first, in one step, so that no process finds half an entry.
            retired = self.directory / f".{key}.{os.getpid()}.old"
            place.rename(retired)
            shutil.rmtree(retired)
            self.lock_file(key).unlink()
            return True

    def clean_up(self) -> None:
        """Deletes leftovers of killed processes, lock files that no process holds, and digests."""
        unfinished = {match[1] for path in self._children() if (match := _UNFINISHED.fullmatch(path.name))}
        locks = {path.stem for path in self._children() if path.suffix == ".lock" and _KEY.fullmatch(path.stem)}
        for key in unfinished | locks:
            with file_lock_if_free(self.lock_file(key)) as is_held:
                if is_held:
                    self.remove_unfinished(key)
                    self.lock_file(key).unlink()
        digests = self.directory / DIGESTS_DIRECTORY
        if digests.is_dir() and not digests.is_symlink():
            for path in digests.iterdir():
                if _DIGEST.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Other files there are not AdaptRT's.
                digests.rmdir()

    def remove_unfinished(self, key: str) -> None:
        """Deletes the leftovers of an entry that was being made or removed. The caller must hold its lock."""
        for path in self._children():
            match = _UNFINISHED.fullmatch(path.name)
            if match and match[1] == key and not path.is_symlink():
                shutil.rmtree(path)

    def _children(self) -> Iterator[Path]:
        return iter(sorted(self.directory.iterdir())) if self.directory.is_dir() else iter(())


def is_entry(place: Path) -> bool:
    """True if a directory is a cache entry and contains nothing else."""
    if place.is_symlink() or not place.is_dir() or producer_of(place / ENTRY_FILE) != PRODUCER:
        return False
    engine = place / ENGINE_DIRECTORY
    names = {path.name for path in place.iterdir()}
    is_whole = names == {ENTRY_FILE, ENGINE_DIRECTORY} and not engine.is_symlink()
    return is_whole and producer_of(engine / CONFIG_FILE) == PRODUCER


def is_of_entry(place: Path) -> bool:
    """True for a cache entry, even if its files are damaged or missing, that contains nothing else."""
    if place.is_symlink() or not place.is_dir():
        return False
    names = {path.name for path in place.iterdir()}
    engine = place / ENGINE_DIRECTORY
    return bool(names) and names <= {ENTRY_FILE, ENGINE_DIRECTORY} and not engine.is_symlink()


def key_of_engine(engine: Path) -> str | None:
    """The key of the entry in the user's cache that has this engine directory; None for other directories."""
    place = engine.absolute().parent
    if engine.name != ENGINE_DIRECTORY or not _KEY.fullmatch(place.name):
        return None
    return place.name if place.parent == EngineCache().directory else None


@contextlib.contextmanager
def unless_read_only() -> Iterator[None]:
    """Skips an optional write if the cache is not writable: read-only or full disk, or owned by another user."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            raise


def write_entry(place: Path, model: str, options: str) -> None:
    """Writes an entry's description into its directory."""
    content = {"producer": {"name": PRODUCER, "version": __version__}, "model": model, "options": options}
    (place / ENTRY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def default_cache_directory() -> Path:
    """$XDG_CACHE_HOME/adaptrt/engines, or ~/.cache/adaptrt/engines if the variable is not set or not absolute.

    Raises ConfigError if there is no home directory either.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if stated.is_absolute():
        return stated / "adaptrt" / "engines"
    try:
        return Path.home() / ".cache" / "adaptrt" / "engines"
    except RuntimeError as error:
        raise ConfigError(f"cannot find the directory for the cache of engines: {error}; set XDG_CACHE_HOME") from None


def _size(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir())


def make_cache_directory(directory: Path) -> None:
    """Creates the cache's directory, readable by this user only: engines contain the weights of models that may be
    private."""
    if directory.is_dir():
        return
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created: {error.strerror}; set XDG_CACHE_HOME to another directory"
        raise ConfigError(f"{directory}: {reason}") from None
