"""Large requests and large answers of one client do not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.async_executor import MANY_RESULTS, Generation
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.service import Service
from support.loop_work import LoopWork
from support.models import ModelSpec, save_model
from support.pooled import save_sentence_transformer
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=272, max_position_embeddings=2048)
LONGEST = 20_000
"""Steps. All the work of a request takes 200,000 to 4,000,000."""
LONGEST_WITH_ECHO = 50_000
"""A prompt's log probs arrive in one piece."""
PATIENCE = 30.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Send = Callable[[Message], Awaitable[None]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("event_loop")
    model = save_model(SPEC, root / "model")
    save_tokenizer(byte_level(), model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    save_sentence_transformer(model, "mean_tokens", normalize=True)
    flags = {"max_batch_size": 256, "max_input_len": 1600, "max_seq_len": 1700, "max_num_tokens": 2048}
    return build_engine(model, root, **flags)


@pytest.fixture
def executor(engine: Path) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(num_threads=1, max_queue_size=2000)
    gc.collect()
    gc.freeze()  # like a server: imported objects are not collected again
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        yield made
    gc.unfreeze()


def serve(executor: adaptrt.Executor, body: Callable[[FastAPI], Awaitable[None]], **limits: Any) -> None:
    """Runs `body` with the application of an executor."""

    async def main() -> None:
        options = ServerOptions(served_model_name=("base",), limits=ServerLimits(**limits))
        service = await Service.open(executor, options)
        try:
            await body(make_app(service))
        finally:
            await service.close()

    asyncio.run(main())


async def post(
    app: FastAPI, path: str, content: dict[str, Any] | bytes, before_body: Send | None = None
) -> tuple[int, bytes]:
    """Returns status and body. content: bytes are sent as they are. `before_body` is awaited before each part of the
    body is read.
    """
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "client": ("127.0.0.1", 1),
        "server": ("localhost", 80), "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    status, body = 0, bytearray()
    request = content if isinstance(content, bytes) else json.dumps(content).encode()
    messages: list[Message] = [{"type": "http.request", "body": request, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        if before_body is not None:
            await before_body(message)
        body.extend(message["body"])

    await app(scope, receive, send)
    return status, bytes(body)


def events(body: bytes) -> list[Any]:
    lines = [line for line in body.decode().split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


LONG = {"ignore_eos": True, "max_tokens": 400, "n": 8, "seed": 3}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, {"prompt": ["ab" * 40] * 1024, "max_tokens": 2, "ignore_eos": True}),
        (COMPLETIONS, {"prompt": ["ab" * 40] * 1024, "max_tokens": 2, "ignore_eos": True, "stream": True}),
        (COMPLETIONS, {"prompt": ["a"] * 4, "n": 256, "max_tokens": 8, "ignore_eos": True}),
        (COMPLETIONS, {**LONG, "prompt": "a", "logprobs": 20}),
        (COMPLETIONS, {**LONG, "prompt": "a", "logprobs": 20, "stream": True}),
        (CHAT, {**LONG, "messages": MESSAGES, "logprobs": True, "top_logprobs": 20}),
        (CHAT, {**LONG, "messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "stream": True}),
        (COMPLETIONS, {"prompt": ["ab" * 700] * 6, "max_tokens": 1, "logprobs": 20, "echo": True}),
        (COMPLETIONS, {"prompt": ["ab" * 700] * 8, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": True}),
        ("/v1/embeddings", {"input": ["ab"] * 1024}),
        ("/v2/models/base/generate", {"input_ids": [3] * 1500, "max_tokens": 1, "return_context_logits": True}),
        ("/tokenize", {"prompt": "ab" * 25_000, "return_token_strs": True}),
    ],
    ids=[
        "prompts", "prompts streamed", "n", "log probs", "log probs streamed", "chat", "chat streamed", "echo",
        "echo streamed", "embeddings", "logits", "tokens",
    ],
)  # fmt: skip
def test_others_wait_for_little_work(executor: adaptrt.Executor, path: str, content: dict[str, Any]) -> None:
    async def body(app: FastAPI) -> None:
        await post(app, path, b"{}")  # FastAPI prepares all routes at the first request
        request = json.dumps(content).encode()
        async with LoopWork() as work:
            status, _ = await post(app, path, request)
        assert status == 200
        assert work.longest < (LONGEST_WITH_ECHO if "echo" in content else LONGEST)

    serve(executor, body)


def test_an_answer_that_is_read_late_is_the_same_and_piles_up_no_results(
    executor: adaptrt.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[Generation] = []
    has_ended = asyncio.Event()
    accept = Generation.accept

    def noting(self: Generation, response: adaptrt.Response) -> None:
        accept(self, response)
        if self not in generations:
            generations.append(self)
        if response.result.is_final:
            has_ended.set()

    async def body(app: FastAPI) -> None:
        content = {**LONG, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        status, whole = await post(app, CHAT, content)
        assert status == 200
        monkeypatch.setattr(Generation, "accept", noting)
        is_read = asyncio.Event()

        async def late(message: Message) -> None:
            await is_read.wait()

        async with LoopWork() as work:
            reading = asyncio.create_task(post(app, CHAT, {**content, "stream": True}, late))
            await has_ended.wait()
            # Results within one time slice may arrive together; they become pieces soon after.
            (generation,) = generations
            end = asyncio.get_running_loop().time() + PATIENCE
            while len(generation._results) >= MANY_RESULTS and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
            assert len(generation._results) < MANY_RESULTS
            is_read.set()
            _, streamed = await reading
        assert work.longest < LONGEST
        texts: dict[int, str] = {}
        entries: dict[int, list[Any]] = {}
        for event in events(streamed):
            (choice,) = event["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
            found = choice["logprobs"]["content"] if choice["logprobs"] else []
            entries[choice["index"]] = entries.get(choice["index"], []) + found
        choices = json.loads(whole)["choices"]
        assert texts == {choice["index"]: choice["message"]["content"] for choice in choices}
        assert entries == {choice["index"]: choice["logprobs"]["content"] for choice in choices}

    serve(executor, body)


def test_requests_for_too_much_are_refused_by_the_limit(executor: adaptrt.Executor) -> None:
    async def body(app: FastAPI) -> None:
        for path, content, said in (
            (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 256}, "--max-answers"),
            (COMPLETIONS, {"prompt": "a", "logprobs": 20, "n": 256, "max_tokens": 1000}, "--max-log-probs"),
            (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 256}, "--max-log-probs"),
            (COMPLETIONS, {"prompt": [5] * 1600, "max_tokens": 1, "logprobs": 9, "echo": True}, "--max-prompt-log"),
            (COMPLETIONS, {"prompt": [5] * 5000, "max_tokens": 1}, "--max-json-items"),
        ):
            status, answer = await post(app, path, content)
            assert (status, said in answer.decode()) == (400, True), answer

    serve(executor, body, max_prompt_log_probs=15_000, max_json_items=4000)
