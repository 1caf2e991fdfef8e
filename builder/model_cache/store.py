"""The cache of engines: entries with a directory `engine`, and digests of model directories (model_digest.py)."""

from __future__ import annotations

import contextlib
import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...common.entry_cache import EntryCache, cache_directory, is_key
from ...common.output_directory import producer_of
from ...formats.checkpoint.config import CONFIG_FILE, PRODUCER
from ...formats.engine.engine_config import engine_file

ENGINE_DIRECTORY: Final = "engine"
DIGESTS_DIRECTORY: Final = "digests"
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


class EngineCache(EntryCache[CachedEngine]):
    """The engines in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: default_cache_directory(). Reads and creates nothing yet."""
        place = default_cache_directory() if directory is None else directory
        super().__init__(place, content=ENGINE_DIRECTORY, noun="engine", producer=PRODUCER)

    def find(self, key: str) -> CachedEngine | None:
        """The entry with a key, even if it is damaged; None if there is none."""
        if not self.has(key):
            return None
        fields = self.description(key)
        model, options = fields.get("model"), fields.get("options")
        if not isinstance(model, str) or not isinstance(options, str):
            model, options = "not known", "damaged"
        place = self.place(key) / ENGINE_DIRECTORY
        return CachedEngine(key, place, model, options, self.size(key), self.last_use(key))

    def used_file(self, key: str) -> Path:
        """The engine's file, which processes mark when they load it."""
        return self.place(key) / ENGINE_DIRECTORY / engine_file(0)

    def is_entry(self, place: Path) -> bool:
        """True if a directory is a cache entry and contains nothing else."""
        return super().is_entry(place) and producer_of(place / ENGINE_DIRECTORY / CONFIG_FILE) == PRODUCER

    def clean_up(self) -> None:
        """Deletes leftovers of killed processes, lock files that no process holds, and digests."""
        super().clean_up()
        digests = self.directory / DIGESTS_DIRECTORY
        if digests.is_dir() and not digests.is_symlink():
            for path in digests.iterdir():
                if _DIGEST.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Other files there are not AdaptRT's.
                digests.rmdir()


def key_of_engine(engine: Path) -> str | None:
    """The key of the entry in the user's cache that has this engine directory; None for other directories."""
    place = engine.absolute().parent
    if engine.name != ENGINE_DIRECTORY or not is_key(place.name):
        return None
    return place.name if place.parent == EngineCache().directory else None


def default_cache_directory() -> Path:
    """$XDG_CACHE_HOME/adaptrt/engines, or ~/.cache/adaptrt/engines; see cache_directory()."""
    return cache_directory("engines")
