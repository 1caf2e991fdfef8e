"""Requests that cause downloads: from roots in object stores, and from allowed sources; no others."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from huggingface_hub import constants
from starlette.types import Message

import adaptrt
from adaptrt import AdapterError, ConfigError
from adaptrt.formats.sources import HubName, ObjectName, Source, hub_root, objects
from adaptrt.formats.sources.allowed import allowed_sources
from adaptrt.formats.sources.downloads import DownloadCache
from adaptrt.formats.sources.remote import DownloadStoppedError
from adaptrt.serve import adapters as served_adapters
from adaptrt.serve import command as serve_command
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.remote_adapters import RemoteAdapters, check_root
from adaptrt.serve.service import Service
from adaptrt.serve.work import WorkKind
from support.hub_server import Hub, hub_server
from support.models import ModelSpec, save_adapter, save_model
from support.object_store import ObjectStoreServer, object_store
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SECONDS = 120.0
ADAPTERS = ("poet", "clerk", "monk")
ROOT = ObjectName("bucket", "roots")


@dataclass(frozen=True)
class Place:
    engine: Path
    local: Path
    """A directory with the adapters."""
    root: Path
    """An empty local root."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("remote")
    tokenizer = byte_level()
    model = save_model(ModelSpec(vocab_size=tokenizer.get_vocab_size()), base / "model")
    save_tokenizer(tokenizer, model)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(model, base / "local" / name, seed, strength=3.0, r=4)
    (base / "root").mkdir()
    return Place(build_engine(model, base), base / "local", base / "root")


@pytest.fixture(scope="module")
def store(place: Place) -> Iterator[ObjectStoreServer]:
    with object_store() as server:
        for name in ADAPTERS:
            server.put_directory(f"roots/team/{name}", place.local / name)
            server.put_directory(f"loras/{name}", place.local / name)
        server.put_directory("private/poet", place.local / "poet")
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DownloadCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return DownloadCache()


class Client:
    """One client, by its address."""

    def __init__(self, app: Any, address: str = "10.0.0.1") -> None:
        self.app = app
        transport = httpx.ASGITransport(app, client=(address, 1))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=SECONDS)

    async def text(self, model: str) -> str:
        answer = await self.complete(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def complete(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "hi", "max_tokens": 6, "temperature": 0, **fields}
        return await self._http.post("/v1/completions", json=body)

    async def load(self, name: str, path: str, **fields: Any) -> httpx.Response:
        return await self._http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self._http.post(path, json=fields)


Body = Callable[[Service, Client], Awaitable[None]]


def run(
    place: Place, body: Body, *allowed: str, roots: tuple[Path | HubName | ObjectName, ...] = (), **limits: int
) -> None:
    """Runs `body` with a server and a client."""

    async def main() -> None:
        executor = adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1))
        options = ServerOptions(
            served_model_name=("base",), adapter_roots=(place.root, *roots), enable_lora_loading=True,
            allowed_adapter_sources=allowed_sources(allowed), limits=ServerLimits(**limits),
        )  # fmt: skip
        service = await Service.open(executor, options)
        try:
            await body(service, Client(make_app(service)))
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(main(), SECONDS))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_adapters_are_found_below_a_root_in_a_store(place: Place, store: ObjectStoreServer) -> None:
    texts: dict[str, str] = {}

    async def local(service: Service, client: Client) -> None:
        texts.update({name: await client.text(name) for name in ("base", *ADAPTERS)})

    async def remote(service: Service, client: Client) -> None:
        for name in ADAPTERS:
            assert await client.text(f"team/{name}") == texts[name]
        assert await client.text("team/poet:0.5+team/poet:0.5") == texts["poet"]
        for name in ("team/nobody", "team", "../private/poet", "s3://bucket/private/poet", "loras/poet", "a*"):
            assert (await client.complete(name)).status_code == 404
        assert not (await service.adapters.not_loaded()).is_complete
        # A path below the root is allowed too.
        assert (await client.load("again", "s3://bucket/roots/team/poet")).status_code == 200
        assert await client.text("again") == texts["poet"]

    run(place, local, roots=(place.local,))
    assert len(set(texts.values())) == 4
    run(place, remote, roots=(ROOT,))


def test_roots_are_checked_at_the_start(store: ObjectStoreServer, caplog: pytest.LogCaptureFixture) -> None:
    check_root(ROOT)
    check_root(ObjectName("bucket", "empty"))
    with pytest.raises(AdapterError, match=r"s3://nowhere/x: was not found \(The specified bucket does not exist\)"):
        check_root(ObjectName("nowhere", "x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setattr(objects, "_ATTEMPTS", 1)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        check_root(ROOT)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert "s3://bucket/roots: the object store cannot be reached" in caplog.text


def test_clients_load_from_allowed_sources(place: Place, store: ObjectStoreServer) -> None:
    async def body(service: Service, client: Client) -> None:
        base = await client.text("base")
        assert (await client.complete("s3://bucket/loras/poet")).status_code == 404
        answer = await client.load("it", "s3://bucket/loras/poet")
        assert answer.status_code == 200, answer.text
        first = await client.text("it")
        assert first != base
        answer = await client.load("it", "s3://bucket/loras/clerk")
        assert "already been loaded" in answer.text
        assert (await client.load("it", "s3://bucket/loras/clerk", load_inplace=True)).status_code == 200
        assert await client.text("it") not in (base, first)
        lora = {"lora_name": "new", "lora_int_id": 1, "lora_path": "s3://bucket/loras/poet"}
        for _ in range(2):
            answer = await client.complete("base", lora_request=lora)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == first
        answer = await client.complete("base", lora_request={**lora, "lora_path": "s3://bucket/loras/clerk"})
        assert "was loaded from another directory" in answer.text
        answer = await client.post("/load_lora_adapter", lora_name="third", lora_path="s3://bucket/loras/monk")
        assert answer.json()["success"] is True, answer.text
        missing = await client.load("none", "s3://bucket/loras/nobody")
        assert missing.status_code == 400
        assert "s3://bucket/loras/nobody: has no adapter_config.json" in missing.text

    run(place, body, "s3://bucket/loras/*")


def test_a_name_that_is_not_allowed_opens_no_connection(
    place: Place, store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("org/poet", "hf://org/poet", "s3://bucket/private/poet", "s3://bucket/loras-x/poet", "other/x",
             "s3://bucket/loras/../private/poet", "org/allowed@refs/pr/1", "https://127.0.0.1:9/x")  # fmt: skip
    opened: list[Any] = []

    def note(name: str) -> None:
        function = getattr(socket.socket, name)

        def call(self: socket.socket, address: Any) -> Any:
            opened.append(address)
            return function(self, address)

        monkeypatch.setattr(socket.socket, name, call)

    async def body(service: Service, client: Client) -> None:
        for name in names:
            answer = await client.load("x", name)
            assert answer.status_code == 400, answer.text
            assert "expected a directory below the server's adapter roots, or a name that" in answer.text
            assert (await client.complete(name)).status_code == 404
            lora = {"lora_name": "x", "lora_int_id": 1, "lora_path": name}
            assert (await client.complete("base", lora_request=lora)).status_code == 400
        assert opened == []

    for method in ("connect", "connect_ex"):
        note(method)
    run(place, body)
    run(place, body, "s3://bucket/loras/*", "hub:org/allowed")

    async def allowed(service: Service, client: Client) -> None:
        assert (await client.load("x", "s3://bucket/loras/poet")).status_code == 200

    run(place, allowed, "s3://bucket/loras/*")
    assert opened != []


def test_sizes_of_downloads_are_bounded(place: Place, store: ObjectStoreServer, cache: DownloadCache) -> None:
    async def body(service: Service, client: Client) -> None:
        for answer in (await client.load("it", "s3://bucket/loras/poet"), await client.complete("team/poet")):
            assert answer.status_code == 400
            assert "bytes; expected at most 1000" in answer.text
        assert cache.entries() == []

    run(place, body, "s3://bucket/loras/*", roots=(ROOT,), max_download_bytes=1000)


def test_the_cache_is_bounded(
    place: Place, store: ObjectStoreServer, cache: DownloadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in (place.local / "poet").iterdir())
    room = 2 * size + 4096

    async def body(service: Service, client: Client) -> None:
        texts = [await client.text(f"team/{name}") for name in ADAPTERS[:2]]
        refused = await client.complete("team/monk")
        assert refused.status_code == 429
        assert "of the cache of downloads are free: loaded adapters use the rest" in refused.text
        monkeypatch.setattr(served_adapters, "RECENT_SECONDS", 0.0)
        await client.text("team/monk")
        assert sorted(adapter.name for adapter in service.adapters.list()) == ["team/clerk", "team/monk"]
        assert [await client.text(f"team/{name}") for name in ADAPTERS[:2]] == texts
        assert sum(entry.num_bytes for entry in cache.entries()) <= room
        # An adapter that a client loaded stays.
        assert (await client.load("mine", "s3://bucket/roots/team/monk")).status_code == 200
        for name in ADAPTERS:
            await client.text(f"team/{name}")
        assert service.adapters.knows("mine")

    run(place, body, roots=(ROOT,), download_cache_bytes=room)


class SlowStore:
    """Replaces downloads by waiting, until they shall stop or are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self._go_on = threading.Event()
        monkeypatch.setattr(RemoteAdapters, "_download", lambda _, remote, stop: self._download(remote.name, stop))

    def _download(self, name: ObjectName, stop: threading.Event) -> Source | None:
        self.begun.append(name.label)
        while not self._go_on.is_set():
            if stop.wait(0.002):
                self.stopped.append(name.label)
                raise DownloadStoppedError
        return None

    def go_on(self) -> None:
        self._go_on.set()


def test_downloads_hold_up_no_other_client(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStore(monkeypatch)

    async def body(service: Service, client: Client) -> None:
        other = Client(client.app, "10.0.0.2")
        loads = [asyncio.create_task(client.load(f"x{i}", f"s3://bucket/loras/{i}")) for i in range(6)]
        await until(lambda: len(slow.begun) == 2)
        assert (await client.complete("base")).status_code == 200
        assert (await client.complete("local/poet")).status_code == 404
        loads.append(asyncio.create_task(other.load("y", "s3://bucket/loras/y")))
        await until(lambda: "y" in slow.begun)
        # A client never has all threads.
        assert len(slow.begun) == 3
        slow.go_on()
        answers = await asyncio.gather(*loads)
        assert {answer.status_code for answer in answers} == {400}

    run(place, body, "s3://bucket/loras/*", download_threads=3)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/load_lora_adapter", "/v1/completions"])
def test_a_download_ends_with_its_client(place: Place, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    slow = SlowStore(monkeypatch)
    fields = {
        "/v1/completions": {"model": "poet", "prompt": "hi", "max_tokens": 2},
    }.get(path, {"lora_name": "x", "lora_path": "s3://bucket/loras/poet"})

    async def body(service: Service, client: Client) -> None:
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "client": ("10.0.0.3", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        }  # fmt: skip
        asking = asyncio.create_task(client.app(scope, receive, send))
        await until(lambda: slow.begun == ["poet"])
        left.set()
        await asking
        await until(lambda: slow.stopped == ["poet"])
        await until(lambda: service.executor.work.counts(WorkKind.DOWNLOADS) == (0, 0))
        assert service.adapters.list() == []

    run(place, body, "s3://bucket/loras/*", roots=(ROOT,))


def test_closing_the_server_ends_downloads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStore(monkeypatch)
    tasks: list[asyncio.Task[httpx.Response]] = []

    async def body(service: Service, client: Client) -> None:
        tasks.append(asyncio.create_task(client.load("x", "s3://bucket/loras/poet")))
        await until(lambda: slow.begun == ["poet"])
        await service.executor.work.close()
        assert (await tasks[0]).status_code == 503
        assert slow.stopped == ["poet"]

    run(place, body, "s3://bucket/loras/*")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as server:
        for name, value in (
            ("ENDPOINT", server.address),
            ("HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
            ("HF_TOKEN_PATH", str(tmp_path / "token")),
            ("HF_STORED_TOKENS_PATH", str(tmp_path / "tokens")),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_DISABLE_XET", True),
        ):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def test_clients_load_from_allowed_repositories(
    place: Place, hub: Hub, cache: DownloadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in (place.local / "poet").iterdir()}
    hub.add("org/poet", files)
    hub.add("org/folders", {f"poet/{name}": content for name, content in files.items()}, branch="v1")
    hub.add("org/old", {"adapter_config.json": b"{}", "adapter_model.bin": b"x" * 5000})

    async def body(service: Service, client: Client) -> None:
        assert (await client.load("poet", "org/poet")).status_code == 200
        assert await client.text("poet") != await client.text("base")
        answer = await client.load("folder", "hf://org/folders@v1/poet")
        assert answer.status_code == 200, answer.text
        assert await client.text("folder") == await client.text("poet")
        for name, message in (
            ("org/none", "no repository"),
            ("org/poet@v7", "has no revision 'v7'"),
            ("org/folders@v1", "has no adapter_config.json; expected the adapter itself"),
            ("org/old", "has only pickled weights (adapter_model.bin); expected safetensors"),
        ):
            answer = await client.load("other", name)
            assert answer.status_code == 400
            assert message in answer.text
        assert sorted(entry.name for entry in cache.entries()) == ["hf://org/folders@v1/poet", "hf://org/poet"]
        assert not (tmp_path / "hub").exists()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert (await client.load("offline", "org/poet")).status_code == 200
        assert "HF_HUB_OFFLINE forbids" in (await client.load("offline2", "org/other")).text

    run(place, body, "hub:org/*")


def test_adapters_are_found_below_a_root_in_the_hub(
    place: Place, hub: Hub, cache: DownloadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"team/{name}/{path.name}": path.read_bytes() for name in ADAPTERS for path in (place.local / name).iterdir()
    }
    hub.add("org/loras", {**files, "README.md": b"x", "team/notes/readme.txt": b"x"})
    hub.add("org/loras", {"poet/" + path.name: path.read_bytes() for path in (place.local / "clerk").iterdir()}, "v1")
    hub.add("org/other", {f"poet/{path.name}": path.read_bytes() for path in (place.local / "poet").iterdir()})
    texts: dict[str, str] = {}

    async def local(service: Service, client: Client) -> None:
        texts.update({name: await client.text(name) for name in ("base", *ADAPTERS)})

    async def remote(service: Service, client: Client) -> None:
        for name in ADAPTERS:
            assert await client.text(f"team/{name}") == texts[name]
        assert await client.text("poet") == texts["clerk"]
        assert await client.text("team/poet:0.5+team/poet:0.5") == texts["poet"]
        assert {name for name in hub.fetched() if "README" in name or "notes" in name} == set()
        assert not (await service.adapters.not_loaded()).is_complete
        monkeypatch.setattr(hub_root, "LISTED_SECONDS", 1e9)
        hub.requests.clear()
        for name in (
            "team/nobody",
            "team",
            "team/notes",
            "../other/poet",
            "org/loras/team/poet",
            "a@b",
            "a:b",
            "README",
        ):
            assert (await client.complete(name)).status_code == 404
        assert hub.requests == []
        for source in ("org/other/poet", "org/loras", "org/loras@refs/pr/1/team/poet", "hf://org/loras@v2/poet"):
            assert (await client.load("other", source)).status_code == 400
        assert hub.requests == []
        # A path below a root is allowed too.
        assert (await client.load("again", "hf://org/loras/team/poet")).status_code == 200
        assert await client.text("again") == texts["poet"]

    async def cut_off(service: Service, client: Client) -> None:
        assert await client.text("team/poet") == texts["poet"]
        assert "HF_HUB_OFFLINE forbids" in (await client.complete("team/new")).text

    async def bounded(service: Service, client: Client) -> None:
        answer = await client.complete("team/poet")
        assert answer.status_code == 400
        assert "bytes; expected at most 1000" in answer.text

    roots = (HubName("org/loras"), HubName("org/loras", "v1"))
    run(place, local, roots=(place.local,))
    run(place, remote, roots=roots)
    run(place, bounded, roots=roots, max_download_bytes=1000)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run(place, cut_off, roots=roots)


def test_roots_in_the_hub_are_checked_at_the_start(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.add("org/loras", {"team/poet/adapter_config.json": b"{}"})
    check_root(HubName("org/loras"))
    check_root(HubName("org/loras", None, "team"))
    for root, said in (
        (HubName("org/none"), "hf://org/none: there is no local path 'org/none', and no repository"),
        (HubName("org/loras", "v7"), "hf://org/loras@v7: the repository has no revision 'v7'"),
        (HubName("org/loras", None, "teams"), "hf://org/loras/teams: the repository has no folder 'teams'"),
        (HubName("org/loras", None, "team/poet"), "hf://org/loras/team/poet: is an adapter itself; expected a reposit"),
    ):
        with pytest.raises(AdapterError, match=said):
            check_root(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        check_root(HubName("org/none"))
    assert "hf://org/none: HF_HUB_OFFLINE forbids downloads" in caplog.text


def test_a_root_that_fails_is_not_asked_again_at_once(place: Place, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/loras", {"team/poet/adapter_config.json": b"{}"}).status = 403

    async def body(service: Service, client: Client) -> None:
        monkeypatch.setattr(hub_root, "LISTED_SECONDS", 1e9)
        for name in ("team/poet", "team/clerk", "team/monk"):
            answer = await client.complete(name)
            assert answer.status_code == 400
            assert "the token may not read the repository" in answer.text
        assert len(hub.requests) == 1
        monkeypatch.setattr(hub_root, "LISTED_SECONDS", -1.0)
        assert (await client.complete("team/poet")).status_code == 400
        assert len(hub.requests) == 2

    run(place, body, roots=(HubName("org/loras"),))


def test_names_of_roots_on_the_command_line(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/loras", {"team/poet/adapter_config.json": b"{}"})
    (tmp_path / "org2" / "loras").mkdir(parents=True)
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    flags = ["model", "--adapter_root", "org/loras", "hub:org/loras", "hf://org/loras/team", "org2/loras"]
    options = serve_command.options_of(parser.parse_args(flags))
    loras = HubName("org/loras")
    assert options.adapter_roots == (loras, loras, HubName("org/loras", None, "team"), Path("org2/loras"))
    with pytest.raises(
        ConfigError, match="adapter_root: hf://org/none: there is no local path 'org/none', and no repo"
    ):
        serve_command.options_of(parser.parse_args(["model", "--adapter_root", "org/none"]))
