"""Slow work of some clients in the whole application: others are answered meanwhile, and nothing waits indefinitely."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from starlette.types import Message

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.http import CLIENT_CLOSED_REQUEST
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.service import Service
from adaptrt.serve.work import WorkKind
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SECONDS = 120.0
MANY = 8


@dataclass(frozen=True)
class Place:
    engine: Path
    root: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("slow")
    tokenizer = byte_level()
    model = save_model(ModelSpec(vocab_size=tokenizer.get_vocab_size()), base / "model")
    save_tokenizer(tokenizer, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    for seed, name in enumerate(("hot", "other")):
        save_adapter(model, base / "root" / name, seed, r=4)
    return Place(build_engine(model, base), base / "root")


class Slow:
    """Replaces a quick function by one that waits until it is released."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._let_go = threading.Event()

    def __call__(self, *_: Any, **__: Any) -> None:
        self.num_begun += 1
        assert self._let_go.wait(SECONDS)

    def let_go(self) -> None:
        self._let_go.set()


class Client:
    """One client, by its address."""

    def __init__(self, app: Any, address: str) -> None:
        transport = httpx.ASGITransport(app, client=(address, 1))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=SECONDS)

    async def complete(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "hi", "max_tokens": 2, **fields}
        return await self._http.post("/v1/completions", json=body)

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self._http.post(path, json=fields)


Body = Callable[[Service, Client, Client], Awaitable[None]]


def run(place: Place, body: Body, **limits: int) -> None:
    """Runs `body` with a server and two of its clients."""

    async def main() -> None:
        executor = adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1))
        options = ServerOptions(
            served_model_name=("base",), adapter_roots=(place.root,), enable_lora_loading=True,
            pooling_type="mean", normalize_embeddings=True,
            limits=ServerLimits(**limits),
        )  # fmt: skip
        service = await Service.open(executor, options)
        try:
            app = make_app(service)
            await body(service, Client(app, "10.0.0.1"), Client(app, "10.0.0.2"))
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(main(), SECONDS))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_slow_guides_keep_no_adapter_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(service: Service, many: Client, one: Client) -> None:
        check, slow = service.executor.executor.check_guide, Slow()
        monkeypatch.setattr(service.executor.executor, "check_guide", slow)
        guided = [asyncio.create_task(many.complete("base", guided_regex="[ab]")) for _ in range(MANY)]
        await until(lambda: slow.num_begun == 1)
        assert (await many.complete("hot")).status_code == 200
        assert (await one.complete("hot")).status_code == 200
        assert (await one.complete("other")).status_code == 200
        # The clients disconnect, which drops work that has not begun.
        await leave(guided)
        slow.let_go()
        monkeypatch.setattr(service.executor.executor, "check_guide", check)
        assert (await one.complete("base", guided_regex="[ab]")).status_code == 200
        assert slow.num_begun == 1

    run(place, body)


FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True},
    "/v1/embeddings": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v2/models/hot/generate": {"text_input": "hi", "max_tokens": 2},
    "/v2/models/hot/generate_stream": {"text_input": "hi", "max_tokens": 2},
    "/v2/models/hot/infer": {"inputs": []},
}


async def ask_and_leave(app: Any, path: str, fields: dict[str, Any], left: asyncio.Event) -> list[Message]:
    """Sends a request and closes its connection. As in a real server, the application's task is not cancelled."""
    body = [{"type": "http.request", "body": json.dumps({"model": "hot", **fields}).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "client": ("10.0.0.3", 1), "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_a_call_whose_client_has_left_never_begins(place: Place, path: str) -> None:
    async def body(service: Service, *_: Client) -> None:
        app, slow, left = make_app(service), Slow(), asyncio.Event()
        work = service.executor.work
        kinds = (WorkKind.ADAPTERS, WorkKind.FILES)
        busy = [asyncio.create_task(work.run(kind, slow)) for kind in kinds]
        await until(lambda: slow.num_begun == len(kinds))
        asking = asyncio.create_task(ask_and_leave(app, path, FIELDS[path], left))
        await until(lambda: any(work.counts(kind)[0] for kind in kinds))
        assert not asking.done()
        left.set()
        assert [message["status"] for message in await asking if "status" in message] in ([], [CLIENT_CLOSED_REQUEST])
        assert [work.counts(kind)[0] for kind in kinds] == [0, 0]
        slow.let_go()
        await asyncio.gather(*busy)
        assert service.adapters.list() == []

    run(place, body, adapter_threads=1, file_threads=1)


def test_a_guide_is_compiled_once_and_then_enters_no_pool(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "call", "parameters": {"type": "object", "properties": {}}}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "tools": [tool]}

    async def body(service: Service, many: Client, one: Client) -> None:
        num_compiled, check = 0, service.executor.executor.check_guide

        def count(guide: adaptrt.GuidedDecodingParams) -> None:
            nonlocal num_compiled
            num_compiled += 1
            check(guide)

        monkeypatch.setattr(service.executor.executor, "check_guide", count)
        for _ in range(2):
            answer = await many.post("/v1/chat/completions", model="base", tool_choice="required", **chat)
            assert answer.status_code == 200
            assert num_compiled == 1
        for _ in range(2):
            assert (await many.complete("base", guided_regex="[ab]")).status_code == 200
            assert num_compiled == 2
        # The client's only thread in the pool is taken.
        slow = Slow()
        monkeypatch.setattr(service.executor.executor, "check_guide", slow)
        waiting = [asyncio.create_task(many.complete("base", guided_regex="[cd]"))]
        await until(lambda: slow.num_begun == 1)
        assert (await many.complete("base", guided_regex="[ab]")).status_code == 200
        await leave(waiting)
        slow.let_go()

    run(place, body)


def test_slow_loads_keep_no_hot_adapter_and_no_other_client_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(service: Service, many: Client, one: Client) -> None:
        assert (await one.complete("hot")).status_code == 200
        add, slow = service.executor.executor.add_adapter, Slow()
        monkeypatch.setattr(service.executor.executor, "add_adapter", slow)
        loads = [
            asyncio.create_task(many.post("/v1/load_lora_adapter", lora_name=f"slow {i}", lora_path="hot"))
            for i in range(MANY)
        ]
        await until(lambda: slow.num_begun == 3)
        monkeypatch.setattr(service.executor.executor, "add_adapter", add)
        for client in (many, one):
            assert (await client.complete("hot")).status_code == 200
        assert (await one.complete("other")).status_code == 200
        await leave(loads)
        slow.let_go()

    run(place, body, adapter_threads=4)


def test_work_that_is_too_much_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(service: Service, many: Client, one: Client) -> None:
        slow = Slow()
        monkeypatch.setattr(service.executor.executor, "check_guide", slow)
        guided = [asyncio.create_task(many.complete("base", guided_regex="[ab]")) for _ in range(2)]
        await until(lambda: slow.num_begun == 1)
        guided.append(asyncio.create_task(many.complete("base", guided_regex="[ab]")))
        (refused,), _ = await asyncio.wait(guided, return_when=asyncio.FIRST_COMPLETED)
        answer = refused.result()
        assert answer.status_code == 429
        assert answer.json()["error"]["message"].startswith("number of requests that wait for guides is 1; expected")
        assert answer.headers["Retry-After"] == "1"
        metrics = generate_latest(service.metrics.registry).decode()
        for name in ("running", "waiting", "refused_total"):
            assert f'adaptrt_work_{name}{{kind="guides"}} 1.0' in metrics
            assert f'adaptrt_work_{name}{{kind="texts"}} 0.0' in metrics
        slow.let_go()
        await asyncio.gather(*guided)

    run(place, body, guide_threads=1, max_waiting_work=1)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_a_fifo_in_a_root_keeps_nobody_waiting(place: Place, file: str) -> None:
    name = f"fifo-{file}"
    directory = place.root / name
    directory.mkdir()
    for source in (place.root / "hot").iterdir():
        if source.name != file:
            (directory / source.name).write_bytes(source.read_bytes())
    os.mkfifo(directory / file)

    async def body(_: Service, many: Client, one: Client) -> None:
        answers = await asyncio.gather(*(many.complete(name) for _ in range(MANY)))
        assert {answer.status_code for answer in answers} <= {400, 404}
        assert (await one.complete("hot")).status_code == 200

    run(place, body)


def test_a_crowd_that_leaves_keeps_no_place(place: Place) -> None:
    async def body(service: Service, many: Client, one: Client) -> None:
        loop = asyncio.get_running_loop()
        for round_ in range(4):
            tasks = []
            for i in range(24):
                client, name = (many, one)[i % 2], ("hot", "other", "hot:0.5+other:0.5", "none")[i % 4]
                tasks.append(asyncio.create_task(client.complete(name, guided_regex=f"[a-{'cdef'[i % 4]}]")))
                if i % 3:
                    loop.call_later(0.004 * (i + round_) % 0.05, tasks[-1].cancel)
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(answer, asyncio.CancelledError) or answer.status_code in (200, 404), answer
            for adapter in ("hot", "other"):
                await one.post("/v1/unload_lora_adapter", lora_name=adapter)
        assert (await one.complete("hot", guided_regex="[ab]")).status_code == 200
        counts = [service.executor.work.counts(kind) for kind in WorkKind]
        assert counts == [(0, 0)] * len(WorkKind)

    run(place, body)


def test_no_adapter_gets_the_name_of_the_base(place: Place) -> None:
    async def body(service: Service, many: Client, one: Client) -> None:
        refused = await one.post("/v1/load_lora_adapter", lora_name="base", lora_path="hot")
        assert refused.status_code == 400
        assert "lora_name is 'base', which is the base model's name" in refused.text

    run(place, body)
