"""Adapters that are not in memory: the event loop reads no file for them, and converts nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from support.loop_work import LoopWork
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"
NUM_COLD: Final = 8
LOAD_STEPS: Final = 5_000
"""Steps of the loop. Reading and converting one of the adapters takes more."""
FILE_EVENTS: Final = frozenset(
    {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree"}
)


class FileWatch:
    """Records the files that one thread opens, lists or changes below a directory."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.num_elsewhere = 0
        """Number of such events of other threads."""
        self._root = ""
        self._thread = 0
        sys.addaudithook(self._note)  # it stays until the process ends

    def watch(self, root: Path) -> None:
        """Begins to record the events of the calling thread."""
        self._root, self._thread = str(root), threading.get_ident()
        self.seen, self.num_elsewhere = [], 0

    def end(self) -> None:
        """Ends recording."""
        self._root = ""

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._root or event not in FILE_EVENTS or not str(arguments[0]).startswith(self._root):
            return
        if threading.get_ident() == self._thread:
            self.seen.append(f"{event} {arguments[0]}")
        else:
            self.num_elsewhere += 1


@pytest.fixture(scope="module")
def files() -> FileWatch:
    return FileWatch()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cold")
    model = save_model(ModelSpec(vocab_size=272), root / "model")
    save_tokenizer(byte_level(), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for i in range(NUM_COLD):
        directory = save_adapter(model, root / "adapters" / f"cold-{i}", 100 + i, r=4)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        save_tokenizer(byte_level(), directory)
    save_adapter(model, root / "adapters" / "hot", 1, r=4)
    build_engine(model, root)
    return root


def serve(root: Path, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        executor = adaptrt.Executor(root / "engine", executor_config=adaptrt.ExecutorConfig(num_threads=1))
        options = ServerOptions(
            served_model_name=("base",), adapter_roots=(root / "adapters",), enable_lora_loading=True
        )
        service = await Service.open(executor, options)
        try:
            transport = httpx.ASGITransport(make_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await body(client)
        finally:
            await service.close()

    asyncio.run(main())


async def complete(client: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def chat(client: httpx.AsyncClient, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_the_loop_reads_no_file_of_adapters(root: Path, files: FileWatch) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        await complete(client, "hot")
        await chat(client, "base")
        files.watch(root / "adapters")
        async with LoopWork() as cold_work:
            answers = await asyncio.gather(*(complete(client, f"cold-{i}") for i in range(NUM_COLD)))
        async with LoopWork() as hot_work:
            await asyncio.gather(*(complete(client, "hot") for _ in range(NUM_COLD)))
        assert len(set(answers)) > 1
        async with LoopWork() as chat_work:
            await asyncio.gather(*(chat(client, f"cold-{i}") for i in range(NUM_COLD)))
        await complete(client, "cold-0:0.5+cold-1:0.5")
        fields = {"lora_name": "cold-2", "lora_path": "cold-3", "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=fields)).status_code == 200
        pinned = {"lora_name": "pinned", "lora_path": "cold-4", "pinned": True}
        assert (await client.post("/load_lora_adapter", json=pinned)).status_code == 200
        await asyncio.gather(complete(client, "cold-2"), chat(client, "cold-2"))
        for name in ("cold-2", "pinned"):
            unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert unloaded.status_code == 200
        for path in ("/v1/models", "/metrics", "/api/state"):
            assert (await client.get(path)).status_code == 200
        files.end()
        assert files.seen == []
        assert files.num_elsewhere > 10 * NUM_COLD
        assert cold_work.longest < hot_work.longest + LOAD_STEPS
        assert chat_work.longest < hot_work.longest + LOAD_STEPS

    serve(root, body)
