"""`adaptrt serve` in its own process with adapter roots in stores, and two servers with one cache."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from adaptrt.formats.sources.downloads import DownloadCache
from support.http_server import http_server
from support.hub_server import hub_server
from support.models import ModelSpec, save_adapter, save_model
from support.object_store import ObjectStoreServer, object_store
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

ADAPTERS = ("poet", "clerk", "monk")
WEIGHTS = "adapter_model.safetensors"
SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    engine: Path
    adapters: Path
    store: ObjectStoreServer

    @property
    def flags(self) -> tuple[object, ...]:
        local = [f"local-{name}={self.adapters / name}" for name in ADAPTERS]
        return ("--num_threads", 1, "--adapter_root", "s3://bucket/roots", "--lora_modules", *local)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("stores")
    model = save_model(ModelSpec(vocab_size=272), base / "model")
    save_tokenizer(byte_level(), model)
    engine = build_engine(model, base)
    with object_store() as store:
        for seed, name in enumerate(ADAPTERS):
            adapter = save_adapter(model, base / "adapters" / name, seed, strength=3.0, r=4)
            store.put_directory(f"roots/team/{name}", adapter)
        store.put_directory("private/poet", base / "adapters" / "poet")
        yield Place(engine, base / "adapters", store)


@pytest.fixture(autouse=True)
def cache(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DownloadCache:
    """The cache of the processes that this test starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place.store.fetched.clear()
    place.store.held = None
    return DownloadCache()


def complete(address: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hi", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)


def text(address: str, model: str) -> str:
    answer = complete(address, model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def fetched_weights(place: Place) -> list[str]:
    return sorted(path for path in place.store.fetched if path.endswith(WEIGHTS))


def unfinished(cache: DownloadCache) -> list[Path]:
    return list(cache.directory.glob(".*.tmp"))


def test_two_servers_share_a_cache(place: Place, cache: DownloadCache) -> None:
    with http_server(place.engine, *place.flags) as first, http_server(place.engine, *place.flags) as second:
        assert complete(first, "team/nobody").status_code == 404
        assert complete(first, "../private/poet").status_code == 404
        assert place.store.fetched == []
        expected = [text(first, f"local-{name}") for name in ADAPTERS]
        assert len(set(expected)) == len(ADAPTERS)
        asked = [(address, f"team/{name}") for name in ADAPTERS for address in (first, second)]
        with ThreadPoolExecutor(len(asked)) as clients:
            answers = list(clients.map(lambda one: text(*one), asked))
        assert answers == [answer for answer in expected for _ in (first, second)]
        # Each adapter was downloaded by one server; the other one waited for it.
        assert fetched_weights(place) == sorted(f"bucket/roots/team/{name}/{WEIGHTS}" for name in ADAPTERS)
        assert sorted(entry.name for entry in cache.entries()) == sorted(
            f"s3://bucket/roots/team/{name}" for name in ADAPTERS
        )
        assert unfinished(cache) == []


def test_a_server_that_is_killed_during_a_download(place: Place, cache: DownloadCache) -> None:
    go_on = threading.Event()
    place.store.held = (f"poet/{WEIGHTS}", go_on)
    command = [sys.executable, "-m", "adaptrt.builder.cli", "serve", place.engine, "--port", 0, *place.flags]
    killed = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert killed.stdout is not None
        address = killed.stdout.readline().split()[-1]
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(complete, address, "team/poet")
            end = time.monotonic() + SECONDS
            while not fetched_weights(place):
                assert time.monotonic() < end
                time.sleep(0.01)
            # The loop answers while the download waits.
            local = text(address, "local-poet")
            assert not asked.done()
            (directory,) = unfinished(cache)
            assert cache.entries() == []
            killed.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                asked.result()
    finally:
        killed.kill()
        killed.communicate(timeout=60)
        go_on.set()
    assert directory.is_dir()
    with http_server(place.engine, *place.flags) as address:
        assert text(address, "team/poet") == local
        assert unfinished(cache) == []
        assert [entry.name for entry in cache.entries()] == ["s3://bucket/roots/team/poet"]


def test_adapters_in_folders_of_a_repository(
    place: Place, cache: DownloadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        for name, value in (
            ("HF_ENDPOINT", hub.address), ("HF_HOME", str(tmp_path / "hub")), ("HF_HUB_DISABLE_XET", "1"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        repository = hub.add(
            "org/loras",
            {f"team/{name}/{file.name}": file.read_bytes() for name in ADAPTERS for file in
             (place.adapters / name).iterdir()},
        )  # fmt: skip
        flags = [flag for flag in place.flags if flag != "s3://bucket/roots"]
        flags.insert(flags.index("--adapter_root") + 1, "hub:org/loras")
        with http_server(place.engine, *flags) as address, ThreadPoolExecutor(1) as clients:
            assert complete(address, "team/nobody").status_code == 404
            repository.slow_after = 100
            asked = clients.submit(text, address, "team/poet")
            end = time.monotonic() + SECONDS
            while not any("/cdn/" in path for _, path, _ in hub.requests):
                assert time.monotonic() < end
                time.sleep(0.01)
            # The loop answers while the download waits.
            local = text(address, "local-poet")
            assert not asked.done()
            repository.go_on.set()
            assert asked.result() == local
            assert text(address, "team/clerk") == text(address, "local-clerk")
        assert sorted(entry.name for entry in cache.entries()) == [
            "hf://org/loras/team/clerk", "hf://org/loras/team/poet"
        ]  # fmt: skip
