"""Downloads adapters for requests. No other module connects to other machines for a request.

Requests may cause downloads from below the remote roots and from allowed sources; see docs/names.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..formats.sources import HubName, ObjectName, Source
from ..formats.sources.allowed import AllowedSources
from ..formats.sources.downloads import DownloadCache, missing_config
from ..formats.sources.grammar import remote_name
from ..formats.sources.hub_files import HubFiles
from ..formats.sources.hub_root import HubRoot
from ..formats.sources.kind import Kind
from ..formats.sources.objects import ObjectStore
from ..formats.sources.remote import Remote
from .options import ServerLimits


class RemoteAdapters:
    """The stores that requests may use. Methods that download run in a thread; all are thread-safe."""

    def __init__(self, roots: Sequence[HubName | ObjectName], allowed: AllowedSources, limits: ServerLimits) -> None:
        """roots: directories of object stores and repositories of the Hub where adapters are found by name.

        Makes no connection yet. Raises AdapterError if a package is missing that a root needs.
        """
        self._roots = tuple(HubRoot(root) if isinstance(root, HubName) else root for root in roots)
        self._allowed = allowed
        self._max_bytes = limits.max_download_bytes
        self._cache = DownloadCache(max_bytes=limits.download_cache_bytes)

    @property
    def has_roots(self) -> bool:
        """True if adapters may be found by name."""
        return bool(self._roots)

    def allowed_name(self, text: str) -> HubName | ObjectName | None:
        """Returns the name that a client may load; None for all other texts. Reads no file, makes no connection."""
        name = remote_name(text)
        if name is None:
            return None
        roots = (root.name if isinstance(root, HubRoot) else root for root in self._roots)
        is_below_root = any(root.has_below(name) for root in roots)
        return name if is_below_root or self._allowed.allows(name) else None

    def find(self, name: str, stop: threading.Event) -> Source | None:
        """Returns the adapter at the path `name` below a root, downloaded if necessary; None if no root has it.

        name: a relative path without '..'. Raises AdapterError, CacheFullError, DownloadStoppedError.
        """
        for root in self._roots:
            place = (root.name if isinstance(root, HubRoot) else root).child(name)
            # A name with characters that stores do not allow is in no root.
            if remote_name(str(place)) != place:
                continue
            remote = root.adapter(name) if isinstance(root, HubRoot) else _remote(place)
            if (found := self._download(remote, stop)) is not None:
                return found
        return None

    def fetch(self, name: HubName | ObjectName, stop: threading.Event) -> Source:
        """Returns the adapter of an allowed_name(), downloaded if necessary.

        Raises AdapterError, CacheFullError, DownloadStoppedError.
        """
        found = self._download(_remote(name), stop)
        if found is None:
            raise Kind.ADAPTER.error(missing_config(name, Kind.ADAPTER))
        return found

    def _download(self, remote: Remote, stop: threading.Event) -> Source | None:
        name = remote.name
        download = self._cache.fetch(remote, max_bytes=self._max_bytes, allow_pickles=False, stop=stop)
        if download is None:
            return None
        return Source(str(name), download.directory, name, download.version, download.lease)


def check_packages(name: HubName | ObjectName) -> None:
    """Raises AdapterError if a package is missing that downloads of such names need."""
    _remote(name)


def check_root(root: HubName | ObjectName) -> None:
    """Raises AdapterError if a root in a store cannot be used, unless the store cannot be reached."""
    if isinstance(root, HubName):
        HubRoot(root).check()
    else:
        ObjectStore(root, Kind.ADAPTER).check()


def _remote(name: HubName | ObjectName) -> Remote:
    if isinstance(name, ObjectName):
        return ObjectStore(name, Kind.ADAPTER)
    return HubFiles(name, Kind.ADAPTER)
