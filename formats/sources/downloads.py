"""The cache of downloads: what was fetched from object stores, and for requests from the Hub.

An entry is one version of one directory. Its description has its name, its kind, and the size and digest of each file.
Sizes and digests are checked when an entry is used again. Processes share the cache, and none deletes an entry that
another uses.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from ..._core import AdapterError, AdaptrtError, CheckpointError
from ...common.entry_cache import ENTRY_FILE, EntryCache, cache_directory, is_key
from ...common.file_digest import add_file
from ...common.file_lock import file_lock, file_lock_if_free
from ...common.progress import Progress, SilentProgress, format_bytes
from ..checkpoint.config import PRODUCER
from ..checkpoint.hf_weights import INDEX_SUFFIX, read_index
from .grammar import HubName, ObjectName
from .kind import Kind
from .lease import Lease
from .needed_files import are_pickled, small_files, weight_files, weights_problem
from .remote import DownloadStoppedError, Listing, Remote, Watch
from .shown import some

_LOG: Final = logging.getLogger("adaptrt")
FILES_DIRECTORY: Final = "files"
_ROOM_LOCK: Final = "room.lock"
_LOCK_SECONDS: Final = 0.05
"""Time between two looks at a lock that another process holds."""


class CacheFullError(AdapterError):
    """The cache of downloads has no room, because all its entries are in use."""


@dataclass(frozen=True)
class CachedDownload:
    """An entry of the cache."""

    key: str
    directory: Path
    name: str
    """Name of the directory in its store."""
    kind: str
    """"model" or "adapter"."""
    num_bytes: int
    last_used: datetime.datetime


def find_download(cache: EntryCache[CachedDownload], key: str) -> CachedDownload | None:
    """The entry of a cache with a key, even if it is damaged; None if there is none."""
    if not cache.has(key):
        return None
    fields = cache.description(key)
    name, kind = fields.get("name"), fields.get("kind")
    if not isinstance(name, str) or not isinstance(kind, str):
        name, kind = "not known", "damaged"
    return CachedDownload(key, cache.place(key) / FILES_DIRECTORY, name, kind, cache.size(key), cache.last_use(key))


@dataclass(frozen=True)
class Download:
    """Downloaded files, and the lease that keeps them."""

    directory: Path
    version: str
    lease: Lease


class DownloadCache(EntryCache[CachedDownload]):
    """The downloads in one directory. Thread-safe."""

    def __init__(self, directory: Path | None = None, *, max_bytes: int | None = None) -> None:
        """directory: None: default_download_directory(). Reads and creates nothing yet.

        max_bytes: before a download, the least recently used entries are deleted until all entries fit; None: none are.
        """
        place = default_download_directory() if directory is None else directory
        super().__init__(place, content=FILES_DIRECTORY, noun="download", producer=PRODUCER)
        self.max_bytes: Final = max_bytes

    def find(self, key: str) -> CachedDownload | None:
        """The entry with a key, even if it is damaged; None if there is none."""
        return find_download(self, key)

    def fetch(
        self,
        remote: Remote,
        *,
        max_bytes: int | None = None,
        allow_pickles: bool = True,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> Download | None:
        """Returns the files of a directory that AdaptRT needs, downloaded if the cache does not have them.

        If the store cannot be reached, the last version in the cache is used. None: the directory has no config file.

        max_bytes: maximum size of the files; None: no limit. stop: ends the download when it is set.

        Raises remote.kind.error, CacheFullError, DownloadStoppedError.
        """
        one = _Fetch(self, remote, max_bytes, allow_pickles, SilentProgress() if progress is None else progress, stop)
        return one.run()

    def lease(self, key: str) -> Lease:
        """Marks an entry as used. The caller must hold its lock."""
        self.touch(key)
        return Lease(self.used_file(key))

    def is_whole(self, key: str) -> bool:
        """True if all files of an entry have the sizes that were noted, and those of adapters their digests."""
        fields = self.description(key)
        noted = fields.get("files")
        if not isinstance(noted, dict) or not noted:
            return False
        directory = self.place(key) / FILES_DIRECTORY
        is_adapter = fields.get("kind") == Kind.ADAPTER.value
        try:
            for name, (num_bytes, digest) in noted.items():
                path = directory / name
                if path.stat().st_size != num_bytes or (is_adapter and _digest(path) != digest):
                    return False
        except (OSError, TypeError, ValueError):
            return False
        return True

    def make_room(self, num_bytes: int) -> None:
        """Deletes the least recently used entries until `num_bytes` more fit.

        Raises CacheFullError if the entries in use leave too little room.
        """
        if self.max_bytes is None:
            return
        if num_bytes > self.max_bytes:
            raise CacheFullError(
                f"the download has {format_bytes(num_bytes)}, and the cache of downloads holds "
                f"{format_bytes(self.max_bytes)}"
            )
        entries = self.entries()
        free = self.max_bytes - sum(entry.num_bytes for entry in entries) - self._reserved()
        for entry in reversed(entries):
            if free >= num_bytes:
                return
            if self.remove_if_unused(entry.key):
                free += entry.num_bytes
        if free < num_bytes:
            raise CacheFullError(
                f"the download has {format_bytes(num_bytes)}, and {format_bytes(max(free, 0))} of the "
                f"{format_bytes(self.max_bytes)} of the cache of downloads are free: loaded adapters use the rest"
            )

    def _reserved(self) -> int:
        """Number of bytes that unfinished downloads will take. Deletes those whose process was killed."""
        total = 0
        for path in sorted(self.directory.glob(".*.tmp")):
            key = path.name.split(".")[1]
            if not is_key(key):
                continue
            with file_lock_if_free(self.lock_file(key)) as is_held:
                if is_held:
                    self.remove_unfinished(key)
                    self.lock_file(key).unlink()
                    continue
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it may have ended meanwhile
                total += int(json.loads((path / ENTRY_FILE).read_text(encoding="utf-8"))["num_bytes"])
        return total


class _Fetch:
    """One call of DownloadCache.fetch()."""

    def __init__(
        self,
        cache: DownloadCache,
        remote: Remote,
        max_bytes: int | None,
        allow_pickles: bool,
        progress: Progress,
        stop: threading.Event | None,
    ) -> None:
        self._cache = cache
        self._remote = remote
        self._max_bytes = max_bytes
        self._allow_pickles = allow_pickles
        self._progress = progress
        self._stop = stop
        self._num_reserved = 0

    def run(self) -> Download | None:
        try:
            listing = self._remote.listing()
        except self._remote.failures as error:
            copy = self._last_copy() if self._remote.is_unreachable(error) else None
            if copy is None:
                raise self._error(self._remote.explain(error)) from error
            _LOG.warning("%s: %s; the downloaded copy is used", self._remote.name, self._remote.explain(error))
            return copy
        if listing is None:
            return None
        chosen = self._chosen(listing)
        self._cache.make_directory()
        key = self._key(listing.version)
        try:
            with self._locked(key):
                if self._cache.has(key):
                    if self._cache.is_whole(key):
                        return self._used(key, listing.version)
                    self._cache.retire(key)
                self._download(key, listing, chosen)
                return self._used(key, listing.version)
        except self._remote.failures as error:
            raise self._error(self._remote.explain(error)) from error

    def _chosen(self, listing: Listing) -> list[str]:
        kind = self._remote.kind
        weights = weight_files(kind, listing.files)
        if (problem := weights_problem(kind, weights, listing.files)) is not None:
            raise self._error(problem)
        if are_pickled(weights) and not self._allow_pickles:
            raise self._error(f"has only pickled weights ({weights[0]}); expected safetensors")
        chosen = [*small_files(kind, listing.files), *weights]
        self._check_size(chosen, listing)
        return chosen

    def _download(self, key: str, listing: Listing, chosen: Sequence[str]) -> None:
        """Downloads into a new directory, which becomes the entry. The caller must hold the entry's lock."""
        self._cache.remove_unfinished(key)
        place = self._cache.directory / f".{key}.{os.getpid()}.tmp"
        files = place / FILES_DIRECTORY
        files.mkdir(parents=True)
        try:
            self._fetch_all(place, chosen, listing)
            index = next((name for name in chosen if name.endswith(INDEX_SUFFIX)), None)
            if index is not None and self._remote.kind is Kind.MODEL:
                shards = self._shards(files / index, listing)
                self._check_size([*chosen, *shards], listing)
                self._fetch_all(place, shards, listing)
                chosen = [*chosen, *shards]
            noted = {name: [listing.files[name], _digest(files / name)] for name in chosen}
            self._describe(place, {"files": noted})
            place.rename(self._cache.place(key))
        except BaseException:
            shutil.rmtree(place)
            raise

    def _fetch_all(self, place: Path, names: Sequence[str], listing: Listing) -> None:
        num_bytes = sum(listing.files[name] for name in names)
        self._reserve(place, num_bytes)
        free = shutil.disk_usage(place).free
        if num_bytes > free:
            raise self._error(
                f"the download needs {format_bytes(num_bytes)}, and {format_bytes(free)} are free at "
                f"{self._cache.directory}; free some space (adaptrt cache), or set XDG_CACHE_HOME to another directory"
            )
        with self._progress.task(f"Downloading {self._remote.name}", num_bytes) as advance:
            watch = Watch(advance, self._stop)
            for name in names:
                watch.check()
                target = place / FILES_DIRECTORY / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._remote.fetch(name, target, watch)

    def _reserve(self, place: Path, num_bytes: int) -> None:
        """Makes room for `num_bytes` more, and notes the size of the unfinished entry for other processes."""
        with file_lock(self._cache.directory / _ROOM_LOCK, on_wait=lambda: None):
            self._cache.make_room(num_bytes)
            self._num_reserved += num_bytes
            self._describe(place, {"num_bytes": self._num_reserved})

    def _shards(self, index: Path, listing: Listing) -> list[str]:
        try:
            shards = sorted(set(read_index(index, check_files=False).values()))
        except CheckpointError as error:
            raise self._error(str(error)) from None
        if absent := [name for name in shards if name not in listing.files]:
            raise self._error(f"the index names {some(absent)}, which the directory does not have")
        return shards

    def _check_size(self, names: Sequence[str], listing: Listing) -> None:
        num_bytes = sum(listing.files[name] for name in names)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise self._error(f"has {num_bytes} bytes; expected at most {self._max_bytes}")

    def _describe(self, place: Path, fields: dict[str, Any]) -> None:
        self._cache.describe(place, {"name": str(self._remote.name), "kind": self._remote.kind.value, **fields})

    def _last_copy(self) -> Download | None:
        """The last used version of the directory in the cache; None if there is none."""
        for entry in self._cache.entries():
            if entry.name != str(self._remote.name) or entry.kind != self._remote.kind.value:
                continue
            with self._locked(entry.key):
                if self._cache.has(entry.key) and self._cache.is_whole(entry.key):
                    return self._used(entry.key, entry.key)
        return None

    def _used(self, key: str, version: str) -> Download:
        files = self._cache.place(key) / FILES_DIRECTORY
        return Download(files, version, self._cache.lease(key))

    def _key(self, version: str) -> str:
        parts = [str(self._remote.name), self._remote.kind.value, version]
        return xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds an entry's lock; waits for a process that holds it, until this download shall stop."""
        while True:
            with file_lock_if_free(self._cache.lock_file(key)) as is_held:
                if is_held:
                    yield
                    return
            if self._stop is not None and self._stop.is_set():
                raise DownloadStoppedError
            time.sleep(_LOCK_SECONDS)

    def _error(self, reason: str) -> AdaptrtError:
        return self._remote.kind.error(f"{self._remote.name.without_prefix}: {reason}")


def default_download_directory() -> Path:
    """$XDG_CACHE_HOME/adaptrt/downloads, or ~/.cache/adaptrt/downloads; see cache_directory()."""
    return cache_directory("downloads")


def missing_config(name: HubName | ObjectName, kind: Kind) -> str:
    """Text for a directory of a store without a config file."""
    no_bucket = ", or there is no such bucket" if isinstance(name, ObjectName) else ""
    return f"{name.without_prefix}: has no {kind.config_file}{no_bucket}; expected the {kind.value} itself"


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    add_file(path, digest)
    return digest.hexdigest()
