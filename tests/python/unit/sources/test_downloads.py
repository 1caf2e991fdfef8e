"""The cache of downloads in random sequences of changes, downloads, damage and deletions, with an in-memory store."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaptrt import AdapterError
from adaptrt.formats.sources import ObjectName, objects
from adaptrt.formats.sources.downloads import CacheFullError, Download, DownloadCache
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.objects import ObjectStore

CONFIG, WEIGHTS, TEMPLATE = "adapter_config.json", "adapter_model.safetensors", "additional_chat_templates/a.jinja"
NEEDED = (CONFIG, WEIGHTS, TEMPLATE)
FILES = st.sampled_from([*NEEDED, "optimizer.pt", "checkpoint-1/adapter_model.safetensors"])
PLACES = st.sampled_from(["a", "b", "a/b"])
BUDGET = 4000


class Objects(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory, with ETags like an object store's."""

    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return [self._tagged(entry) for entry in super().ls(path, detail=True, **kwargs)]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._tagged(super().info(path, **kwargs))

    def _tagged(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["type"] == "file":
            entry["ETag"] = f'"{hashlib.md5(self.store[entry["name"]].getvalue()).hexdigest()}"'
        return entry


class DownloadMachine(RuleBasedStateMachine):
    """A store of a few directories, and a small cache in front of it."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.store = Objects()
        self.store.store.clear()
        self.store.pseudo_dirs[:] = [""]
        self.patch.setattr(objects, "_filesystem", lambda: self.store)
        self.place = tempfile.TemporaryDirectory()
        self.cache = DownloadCache(Path(self.place.name) / "cache", max_bytes=BUDGET)
        self.files: dict[str, dict[str, bytes]] = {}
        self.held: dict[str, Download] = {}

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
            self.held.clear()
            self.place.cleanup()

    @rule(place=PLACES, file=FILES, content=st.binary(max_size=1500))
    def put(self, place: str, file: str, content: bytes) -> None:
        self.store.pipe_file(f"/bucket/{place}/{file}", content)
        self.files.setdefault(place, {})[file] = content

    @rule(place=PLACES)
    def put_adapter(self, place: str) -> None:
        for file in (CONFIG, WEIGHTS):
            self.put(place, file, file.encode())

    @rule(place=PLACES, is_kept=st.booleans())
    def fetch(self, place: str, is_kept: bool) -> None:
        files = self.files.get(place, {})
        needed = {name: files[name] for name in NEEDED if name in files}
        try:
            download = self.cache.fetch(ObjectStore(ObjectName("bucket", place), Kind.ADAPTER))
        except CacheFullError:
            assert sum(map(len, needed.values())) > BUDGET or self.held
            return
        except AdapterError as error:
            assert "has no weights that can be read" in str(error)  # noqa: PT017
            assert CONFIG in files
            assert WEIGHTS not in files
            return
        if download is None:
            assert CONFIG not in files
            return
        found = {
            path.relative_to(download.directory).as_posix(): path.read_bytes()
            for path in download.directory.rglob("*")
            if path.is_file()
        }
        assert found == needed
        if is_kept:
            self.held[place] = download

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(self.held)))]
        gc.collect()

    @rule(data=st.data(), content=st.binary(max_size=20))
    def damage(self, data: st.DataObject, content: bytes) -> None:
        kept = {download.directory for download in self.held.values()}
        paths = [
            path
            for entry in self.cache.entries()
            if entry.directory not in kept
            for path in sorted(entry.directory.rglob("*"))
            if path.is_file()
        ]
        if paths:
            data.draw(st.sampled_from(paths)).write_bytes(content)

    @rule()
    def clear(self) -> None:
        for entry in self.cache.entries():
            self.cache.remove_if_unused(entry.key)
        self.cache.clean_up()
        assert {entry.directory for entry in self.cache.entries()} == {one.directory for one in self.held.values()}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if not hasattr(self, "cache") or not self.cache.directory.is_dir():
            return
        assert list(self.cache.directory.glob(".*.tmp")) == []
        assert all(download.directory.is_dir() for download in self.held.values())


TestDownloads = DownloadMachine.TestCase
TestDownloads.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
