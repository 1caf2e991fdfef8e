"""Adapters and models in an object store: a server that speaks S3, read by the real s3fs."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from adaptrt import AdapterError, ConfigError
from adaptrt.builder.cli import main as command_line
from adaptrt.common.file_lock import file_lock
from adaptrt.formats.sources import ObjectName, downloads, find_adapter, find_model, find_sum, objects
from adaptrt.formats.sources.downloads import CacheFullError, Download, DownloadCache
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.objects import ObjectStore
from adaptrt.formats.sources.remote import DownloadStoppedError
from support.object_store import BUCKET, ObjectStoreServer, object_store

WEIGHTS = bytes(range(256)) * 40
ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": WEIGHTS,
    "additional_chat_templates/tools.jinja": b"x",
    "optimizer.pt": WEIGHTS + b"optimizer",
    "checkpoint-1/adapter_model.safetensors": WEIGHTS + b"checkpoint",
}
NEEDED = {"adapter_config.json", "adapter_model.safetensors", "additional_chat_templates/tools.jinja"}
SIZE = sum(len(ADAPTER[name]) for name in NEEDED)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreServer:
    """Returns the server without objects, and empties the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    server.clear()
    return server


def files_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def fetched(cache: DownloadCache, path: str, kind: Kind = Kind.ADAPTER, **options: Any) -> Download:
    download = cache.fetch(ObjectStore(ObjectName(BUCKET, path), kind), **options)
    assert download is not None
    return download


def test_an_adapter_is_fetched_once(store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = store.put("loras/poet", ADAPTER)
    source = find_adapter(name)
    assert files_in(source.directory) == NEEDED
    assert (source.directory / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (source.label, source.last_part, str(source)) == ("poet", "poet", name)
    monkeypatch.setattr(ObjectStore, "fetch", None)
    again = find_adapter(name + "/")
    assert (again.directory, again.record) == (source.directory, source.record)
    assert str(source.record).startswith(f"{name}@")


def test_a_new_version_is_another_entry(store: ObjectStoreServer) -> None:
    before = find_adapter(store.put("poet", ADAPTER))
    store.put("poet", {"adapter_model.safetensors": WEIGHTS[::-1]})
    after = find_adapter("s3://bucket/poet")
    assert after.record != before.record
    assert (before.directory / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (after.directory / "adapter_model.safetensors").read_bytes() == WEIGHTS[::-1]


def test_shards_of_the_index_are_fetched(store: ObjectStoreServer) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": WEIGHTS + b"1",
        "model-2.safetensors": WEIGHTS + b"2",
        "model-3.safetensors": WEIGHTS + b"3",
    }
    source = find_model(store.put("model", files))
    assert files_in(source.directory) == {*files} - {"model-3.safetensors"}
    store.put("less", {name: files[name] for name in files if name != "model-2.safetensors"})
    with pytest.raises(ConfigError, match=r"s3://bucket/less: the index names model-2\.safetensors, which the dir"):
        find_model("s3://bucket/less")
    assert [entry.name for entry in DownloadCache().entries()] == ["s3://bucket/model"]


def test_a_sum_of_names(store: ObjectStoreServer) -> None:
    first = store.put("a", ADAPTER)
    second = store.put("b", {**ADAPTER, "adapter_model.safetensors": WEIGHTS[1:]})
    terms = find_sum(f"{first}:0.7+{second}:0.3")
    assert terms is not None
    assert [(source.given, weight) for source, weight in terms.items()] == [(first, 0.7), (second, 0.3)]
    with pytest.raises(AdapterError, match="'s3://bucket/a' twice; expected each adapter once"):
        find_sum(f"{first}:0.7+{first}:0.3")


@pytest.mark.parametrize("place", ["nowhere", "no/where"])
def test_missing_objects_are_named(store: ObjectStoreServer, place: str) -> None:
    with pytest.raises(
        AdapterError, match=rf"s3://bucket/{place}: has no adapter_config\.json, or there is no such buc"
    ):
        find_adapter(f"s3://bucket/{place}")
    with pytest.raises(ConfigError, match=r"s3://elsewhere/x: has no config\.json, or there is no such bucket"):
        find_model("s3://elsewhere/x")
    store.put("bare", {"adapter_config.json": b"{}", "x.gguf": b"x"})
    with pytest.raises(AdapterError, match=r"s3://bucket/bare: has no weights that can be read; .*it holds x\.gguf"):
        find_adapter("s3://bucket/bare")


def test_missing_credentials_are_said(
    store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.put("poet", ADAPTER)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(AdapterError, match=r"s3://bucket/poet: no credentials were found .*set AWS_ACCESS_KEY_ID"):
        find_adapter("s3://bucket/poet")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_copy_serves_without_the_store(
    store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = find_adapter(store.put("poet", ADAPTER))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_ATTEMPTS", 1)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert find_adapter("s3://bucket/poet").directory == source.directory
    assert "s3://bucket/poet: the object store cannot be reached" in caplog.text
    with pytest.raises(AdapterError, match=r"s3://bucket/other: the object store cannot be reached .*AWS_ENDPOINT_URL"):
        find_adapter("s3://bucket/other")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ConfigError, match=r"s3://bucket/x: names of object stores need s3fs: pip install 'adaptrt\[s3\]"
    ):
        find_model("s3://bucket/x")


def test_an_object_that_changes_during_the_download_is_refused(
    store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("poet", ADAPTER)
    fetch = ObjectStore.fetch

    def change(self: ObjectStore, file: str, *args: Any) -> None:
        store.put("poet", {"adapter_model.safetensors": WEIGHTS[::-1]})
        fetch(self, file, *args)

    monkeypatch.setattr(ObjectStore, "fetch", change)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors was replaced while the directory was read"):
        find_adapter("s3://bucket/poet")
    assert list(DownloadCache().directory.glob("[!.]*/")) == []
    assert list(DownloadCache().directory.glob(".*.tmp")) == []


def test_bytes_that_have_another_digest_are_refused(store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("poet", ADAPTER)
    from s3fs.core import S3File

    fetch = S3File._fetch_range
    monkeypatch.setattr(S3File, "_fetch_range", lambda *args: fetch(*args)[:-1] + b"?")
    with pytest.raises(
        AdapterError, match=r"adapter_config\.json has the MD5 [0-9a-f]{32}; expected [0-9a-f]{32}, its"
    ):
        find_adapter("s3://bucket/poet")
    monkeypatch.setattr(S3File, "_fetch_range", lambda *args: b"")
    with pytest.raises(AdapterError, match=r"adapter_config\.json has 0 bytes; expected 21"):
        find_adapter("s3://bucket/poet")


def test_the_etag_of_an_encrypted_object_is_no_digest(
    store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("poet", ADAPTER)
    monkeypatch.setattr(objects, "_etag", lambda entry: "0" * 32)
    with pytest.raises(AdapterError, match=r"expected 0{32}, its ETag"):
        find_adapter("s3://bucket/poet")
    for name in ADAPTER:
        store.files.pipe_file(f"{BUCKET}/poet/{name}", ADAPTER[name], ServerSideEncryption="aws:kms")
    assert find_adapter("s3://bucket/poet").label == "poet"


@pytest.mark.parametrize("damage", [b"", WEIGHTS[::-1]])
def test_a_damaged_entry_is_fetched_again(store: ObjectStoreServer, damage: bytes) -> None:
    source = find_adapter(store.put("poet", ADAPTER))
    (source.directory / "adapter_model.safetensors").write_bytes(damage)
    assert (find_adapter("s3://bucket/poet").directory / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_a_full_disk_is_said(store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("poet", ADAPTER)
    usage = downloads.shutil.disk_usage("/")
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(
        AdapterError, match=r"the download needs 1\d\.\d KiB, and 100 bytes are free at .*XDG_CACHE_HOME"
    ):
        find_adapter("s3://bucket/poet")
    monkeypatch.undo()


def test_a_disk_that_becomes_full_is_said(store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("poet", ADAPTER)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(ObjectStore, "fetch", fail)
    with pytest.raises(AdapterError, match=r"s3://bucket/poet: the disk of the cache is full; free some space"):
        find_adapter("s3://bucket/poet")


def test_sizes_are_bounded(store: ObjectStoreServer) -> None:
    store.put("poet", ADAPTER)
    with pytest.raises(AdapterError, match=rf"s3://bucket/poet: has {SIZE} bytes; expected at most {SIZE - 1}"):
        fetched(DownloadCache(), "poet", max_bytes=SIZE - 1)
    assert fetched(DownloadCache(), "poet", max_bytes=SIZE).directory.is_dir()


def test_pickles_may_be_forbidden(store: ObjectStoreServer) -> None:
    store.put("old", {"adapter_config.json": b"{}", "adapter_model.bin": WEIGHTS})
    with pytest.raises(AdapterError, match=r"has only pickled weights \(adapter_model\.bin\); expected safetensors"):
        fetched(DownloadCache(), "old", allow_pickles=False)
    assert files_in(fetched(DownloadCache(), "old").directory) == {"adapter_config.json", "adapter_model.bin"}


def test_the_least_recently_used_entries_make_room(store: ObjectStoreServer) -> None:
    for name in ("a", "b", "c"):
        store.put(name, ADAPTER)
    probe = DownloadCache()
    fetched(probe, "a")
    (entry,) = probe.entries()
    cache = DownloadCache(max_bytes=2 * entry.num_bytes + 100)
    fetched(cache, "b")
    for age, name in ((50, "b"), (10, "a")):
        (key,) = (one.key for one in cache.entries() if one.name == f"s3://bucket/{name}")
        os.utime(cache.place(key) / "entry.json", (time.time() - age,) * 2)
    held = fetched(cache, "c")
    assert sorted(one.name for one in cache.entries()) == ["s3://bucket/a", "s3://bucket/c"]
    also_held = fetched(cache, "a")
    with pytest.raises(
        CacheFullError, match=r"and \d+ bytes of the .* of the cache of downloads are free: loaded adapt"
    ):
        fetched(cache, "b")
    assert (held.directory / "adapter_model.safetensors").is_file()
    del held
    gc.collect()
    fetched(cache, "b")
    assert sorted(one.name for one in cache.entries()) == ["s3://bucket/a", "s3://bucket/b"]
    assert also_held.directory.is_dir()
    with pytest.raises(CacheFullError, match=r"the cache of downloads holds 1000 bytes"):
        fetched(DownloadCache(max_bytes=1000), "c")


def test_unfinished_downloads_of_other_processes_take_room(store: ObjectStoreServer) -> None:
    store.put("poet", ADAPTER)
    cache = DownloadCache(max_bytes=SIZE + 1000)
    cache.make_directory()
    key = "0123456789abcdef"
    unfinished = cache.directory / f".{key}.99999.tmp"
    unfinished.mkdir()
    cache.describe(unfinished, {"num_bytes": 1001})
    with file_lock(cache.lock_file(key), on_wait=lambda: None), pytest.raises(CacheFullError):
        fetched(cache, "poet")
    # The other process was killed.
    assert fetched(cache, "poet").directory.is_dir()
    assert not unfinished.exists()


def test_the_command_lists_and_deletes_downloads(store: ObjectStoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    held = find_adapter(store.put("poet", ADAPTER))
    find_adapter(store.put("clerk", ADAPTER))
    assert command_line(["cache"]) == 0
    listed = capsys.readouterr().out
    assert "s3://bucket/poet" in listed
    assert "2 downloads" in listed
    assert command_line(["cache", "--clear"]) == 0
    assert "kept, because a process uses it" in capsys.readouterr().out
    (entry,) = DownloadCache().entries()
    assert entry.name == "s3://bucket/poet"
    assert command_line(["cache", "--remove", entry.key]) == 2
    assert "is in use" in capsys.readouterr().err
    assert held.directory.is_dir()
    del held
    gc.collect()
    assert command_line(["cache", "--remove", entry.key]) == 0
    assert DownloadCache().entries() == []
    find_adapter("s3://bucket/poet")
    gc.collect()
    assert command_line(["cache", "--max_bytes", "1"]) == 0
    assert "1 download removed" in capsys.readouterr().out
    assert DownloadCache().entries() == []


def test_a_download_that_nothing_waits_for_ends(store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("poet", ADAPTER)
    stop = threading.Event()
    fetch = ObjectStore.fetch
    started: list[str] = []

    def stop_first(self: ObjectStore, file: str, *args: Any) -> None:
        started.append(file)
        stop.set()
        fetch(self, file, *args)

    monkeypatch.setattr(ObjectStore, "fetch", stop_first)
    with pytest.raises(DownloadStoppedError):
        fetched(DownloadCache(), "poet", stop=stop)
    assert len(started) == 1
    assert DownloadCache().entries() == []
    # Another process downloads the same directory.
    monkeypatch.setattr(downloads, "file_lock_if_free", lambda path: contextlib.nullcontext(False))
    with pytest.raises(DownloadStoppedError):
        fetched(DownloadCache(), "poet", stop=stop)


PROGRAM = """
import sys, time
from pathlib import Path
from adaptrt.formats.sources import find_adapter
from adaptrt.formats.sources.objects import ObjectStore
fetch = ObjectStore.fetch
def slow(self, file, target, watch):
    fetch(self, file, target, watch)
    if file == "adapter_model.safetensors":
        Path(sys.argv[1]).touch()
        while not Path(sys.argv[2]).exists():
            time.sleep(0.01)
ObjectStore.fetch = slow
print(find_adapter("s3://bucket/poet").directory)
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "begun"), str(tmp_path / "go on")]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_processes_and_a_killed_download(store: ObjectStoreServer, tmp_path: Path, is_killed: bool) -> None:
    store.put("poet", ADAPTER)
    first, second = start(tmp_path), start(tmp_path)
    wait_for(tmp_path / "begun")
    assert len(list(DownloadCache().directory.glob(".*.tmp"))) == 1
    assert DownloadCache().entries() == []
    if is_killed:
        (unfinished,) = DownloadCache().directory.glob(".*.tmp")
        pid = int(unfinished.name.split(".")[2])
        killed, other = (first, second) if first.pid == pid else (second, first)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
        processes = [other]
    else:
        processes = [first, second]
    (tmp_path / "go on").touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert len({output for output, _ in outputs}) == 1
    assert (Path(outputs[0][0].strip()) / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert list(DownloadCache().directory.glob(".*.tmp")) == []
