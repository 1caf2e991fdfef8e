"""Downloads of AdaptRT in the cache of huggingface_hub, which other programs use too.

Each entry is a note of one commit of a repository; the files are in the cache of huggingface_hub. Commits that another
program downloaded have no note, so AdaptRT does not delete them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import xxhash

from ..._core import ConfigError
from ...common.entry_cache import ENTRY_FILE, EntryCache, cache_directory, unless_read_only
from ...common.file_lock import file_lock
from ..checkpoint.config import PRODUCER
from .downloads import FILES_DIRECTORY, CachedDownload
from .grammar import HubName
from .kind import Kind
from .lease import Lease


class HubDownloads(EntryCache[CachedDownload]):
    """The notes in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: $XDG_CACHE_HOME/adaptrt/hub. Reads and creates nothing yet."""
        place = cache_directory("hub") if directory is None else directory
        super().__init__(place, content=FILES_DIRECTORY, noun="download from the Hub", producer=PRODUCER)

    def note(self, name: HubName, kind: Kind, snapshot: Path, *, is_new: bool) -> Lease | None:
        """Notes a commit that is about to be downloaded, and marks it as used.

        name: the repository with the commit. snapshot: directory of the commit. is_new: False: notes nothing, and marks
        a commit that is noted already. None: there is no note.
        """
        key = xxhash.xxh3_64_hexdigest(json.dumps([name.repository, str(snapshot)]).encode())
        if not is_new and not self.has(key):
            return None
        with unless_read_only():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file_lock(self.lock_file(key), on_wait=lambda: None):
                if not self.has(key):
                    self.place(key).mkdir()
                    whole = HubName(name.repository, name.revision)
                    self.describe(self.place(key), {"name": str(whole), "kind": kind.value, "snapshot": str(snapshot)})
                self.touch(key)
                return Lease(self.used_file(key))
        return None

    def find(self, key: str) -> CachedDownload | None:
        """The note with a key; None if there is none, or if its files are gone."""
        if not self.has(key):
            return None
        fields = self.description(key)
        name, kind, snapshot = (fields.get(field) for field in ("name", "kind", "snapshot"))
        if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(snapshot, str):
            return CachedDownload(key, self.place(key), "not known", "damaged", 0, self.last_use(key))
        directory = Path(snapshot)
        if not directory.is_dir():
            return None
        # The files are links to blobs.
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return CachedDownload(key, directory, name, kind, num_bytes, self.last_use(key))

    def is_entry(self, place: Path) -> bool:
        """True if a directory is a note and contains nothing else."""
        return self.is_of_entry(place)

    def is_of_entry(self, place: Path) -> bool:
        """True for a note, even if it is damaged, that contains nothing else."""
        return not place.is_symlink() and place.is_dir() and {path.name for path in place.iterdir()} == {ENTRY_FILE}

    def retire(self, key: str) -> None:
        """Deletes a commit from the cache of huggingface_hub, and its note. The caller must hold the note's lock."""
        snapshot = self.description(key).get("snapshot")
        if isinstance(snapshot, str) and Path(snapshot).is_dir():
            _delete_commit(Path(snapshot))
        super().retire(key)

    def clean_up(self) -> None:
        """Deletes leftovers of killed processes, and notes whose files are gone."""
        super().clean_up()
        for path in self._children():
            if self.has(path.name) and self.find(path.name) is None:
                self.remove_if_unused(path.name)


def _delete_commit(snapshot: Path) -> None:
    """Deletes a commit, and the blobs that no other commit has. snapshot: CACHE/models--.../snapshots/COMMIT."""
    try:
        from huggingface_hub import scan_cache_dir
    except ImportError:
        raise ConfigError(f"{snapshot}: huggingface_hub deletes it: pip install 'adaptrt[hub]'") from None
    whole = scan_cache_dir(snapshot.parents[2])
    # A copy of a repository has the same commits.
    repository = frozenset(one for one in whole.repos if one.repo_path == snapshot.parents[1])
    replace(whole, repos=repository).delete_revisions(snapshot.name).execute()
