"""The server's application in this process, with a client: one engine, adapters below a root, and a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SECONDS = 120.0
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class AppPlace:
    """An engine, and the root of its adapters."""

    engine: Path
    root: Path
    model: Path


def make_place(base: Path, adapters: tuple[str, ...], **flags: Any) -> AppPlace:
    """Builds a random engine, and random adapters of rank 4 below a root. flags: of the build."""
    tokenizer = byte_level()
    model = save_model(ModelSpec(vocab_size=tokenizer.get_vocab_size()), base / "model")
    save_tokenizer(tokenizer, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for seed, name in enumerate(adapters):
        save_adapter(model, base / "root" / name, seed, strength=3.0, r=4)
    return AppPlace(build_engine(model, base, **flags), base / "root", model)


class AppClient:
    """A client of the application."""

    def __init__(self, service: Service) -> None:
        self.service = service
        transport = httpx.ASGITransport(make_app(service))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=SECONDS)

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=fields)

    async def tokens(self, model: str, **fields: Any) -> list[int]:
        """Returns the tokens of an answer to a fixed prompt."""
        body = {"model": model, "prompt": "hello, world", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = await self.post("/v1/completions", **{**body, **fields})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    async def load(self, name: str, path: str, *, inplace: bool = True) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, load_inplace=inplace)

    async def adapters(self, **query: Any) -> list[dict[str, Any]]:
        """Returns the rows of the list of adapters."""
        answer = await self.http.get("/v1/adapters", params=query)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])


def run_app(
    place: AppPlace,
    body: Callable[[AppClient], Awaitable[None]],
    config: adaptrt.ExecutorConfig | None = None,
    **options: Any,
) -> None:
    """Runs `body` with a client of a new server."""

    async def main() -> None:
        executor = adaptrt.Executor(
            place.engine, executor_config=config or adaptrt.ExecutorConfig(num_threads=1), compare_vocabularies=False
        )
        given = {"served_model_name": ("base",), "adapter_roots": (place.root,), "enable_lora_loading": True}
        service = await Service.open(executor, ServerOptions(**{**given, **options}))
        try:
            await body(AppClient(service))
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(main(), SECONDS))
