"""Stored and running responses: who may read, cancel and delete them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from adaptrt._core import RequestError
from adaptrt.serve import responses as module
from adaptrt.serve.answer_parts import PlainText
from adaptrt.serve.errors import ApiError
from adaptrt.serve.generation import TextPiece
from adaptrt.serve.http import EventStream
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.records import RequestRecord, current_request
from adaptrt.serve.response_store import home_in, home_of
from adaptrt.serve.responses import Responses
from adaptrt.serve.responses_fields import ResponseRequest
from adaptrt.serve.work import WorkKind


class Generation:
    """Yields "a", then waits for the test to end it."""

    def __init__(self) -> None:
        self.end: asyncio.Future[TextPiece] = asyncio.get_running_loop().create_future()

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        yield TextPiece("a", (1,))
        yield await self.end

    async def whole(self) -> list[TextPiece]:
        return [TextPiece("a", (1,), finish_reason="stop")]

    def cancel(self) -> None:
        self.end.set_result(TextPiece("", (), finish_reason="abort"))


HOME = home_of("replica1")


class World:
    """Responses over generations that the test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...] = (), **limits: Any) -> None:
        options = ServerOptions(limits=ServerLimits(**limits), api_keys=keys, response_home=HOME)
        service: Any = SimpleNamespace(
            shown_model=lambda adapter: adapter or "base",
            executor=SimpleNamespace(work=SimpleNamespace(run=self._run)),
            options=options,
            model_names=("base",),
            sampling_defaults=SimpleNamespace(given=lambda: {"top_p": 0.5}),
        )
        self.chats: list[ChatRequest] = []
        self.generations: list[Generation] = []
        self.responses = Responses(service)
        monkeypatch.setattr(module.Conversation, "of", self._conversation)

    async def _conversation(self, service: Any, chat: ChatRequest) -> Any:
        self.chats.append(chat)
        request = SimpleNamespace(prompt=[1])
        return SimpleNamespace(adapter=None, request=request, make_splitter=PlainText, start=self._start)

    async def _start(self, service: Any, stack: AsyncExitStack) -> Generation:
        self.generations.append(Generation())
        return self.generations[-1]

    async def _run(self, kind: WorkKind, function: Any, *args: Any) -> Any:
        return function(*args)

    async def create(self, **fields: Any) -> Any:
        return await self.responses.create(ResponseRequest.model_validate({"input": "x", **fields}))

    async def made(self, **fields: Any) -> dict[str, Any]:
        return content(await self.create(**fields))


def content(response: Response) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(bytes(response.body))
    return fields


def event(frames: bytes) -> dict[str, Any]:
    """Returns the last event of some frames."""
    last = frames.decode().strip().split("\n\n")[-1]
    name, data = last.split("\n")
    fields: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {fields['type']}"
    return fields


async def begun(stream: EventStream) -> tuple[str, AsyncIterator[bytes]]:
    """Reads a stream up to its first text; returns the response's id and the rest."""
    frames = stream._frames
    first = event(await anext(frames))
    assert event(await anext(frames))["delta"] == "a"
    return first["response"]["id"], frames


def test_a_running_response_can_be_read_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        stream = await world.create(stream=True)
        async with stream._source:
            name, frames = await begun(stream)
            assert content(await world.responses.read(name))["status"] == "in_progress"
            with pytest.raises(ApiError, match="is being generated; expected one that has ended"):
                world.responses.delete(name)
            assert content(await world.responses.cancel(name))["status"] == "cancelled"
            last = event(b"".join([frame async for frame in frames]))
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
            assert content(await world.responses.read(name)) == last["response"]
            assert content(await world.responses.cancel(name)) == last["response"]
            # The client may use its response before the connection has ended.
            world.responses.delete(name)
        for call in (world.responses.read, world.responses.cancel):
            with pytest.raises(ApiError, match="is not stored here"):
                await call(name)

    asyncio.run(run())


def test_a_stream_that_its_client_leaves_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        stream = await world.create(stream=True)
        async with stream._source:
            name, _ = await begun(stream)
        with pytest.raises(ApiError, match="is not stored here"):
            await world.responses.read(name)

    asyncio.run(run())


def test_a_stream_that_fails_says_so_and_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        stream = await world.create(stream=True)
        async with stream._source:
            name, frames = await begun(stream)
            world.generations[0].end.set_exception(RequestError("broken"))
            last = event(b"".join([frame async for frame in frames]))
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "broken")
        assert content(await world.responses.read(name))["status"] == "failed"

    asyncio.run(run())


def test_a_response_is_continued_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        first = await world.made(instructions="i", input="x")
        assert home_in(first["id"]) == HOME
        second = await world.made(instructions="j", input="y", previous_response_id=first["id"])
        await world.made(input="z", previous_response_id=second["id"])
        assert [[message.content for message in chat.messages] for chat in world.chats] == [
            ["i", "x"],
            ["j", "x", "a", "y"],
            ["x", "a", "y", "a", "z"],
        ]
        assert second["previous_response_id"] == first["id"]
        assert (second["top_p"], second["temperature"]) == (0.5, 1.0)
        assert (await world.made(top_p=0.9))["top_p"] == 0.9

    asyncio.run(run())


def test_a_conversation_counts_with_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        store = world.responses._store
        first = await world.made(input="x" * 10_000)
        alone = store.num_bytes
        assert 20_000 < alone < 23_000  # as an item and as a message
        await world.made(previous_response_id=first["id"])
        assert 10_000 < store.num_bytes - alone < 13_000


def test_long_conversations_are_continued_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        items = [{"role": "user", "content": f"{i}"} for i in range(300)]
        first = await world.made(input=items)
        await world.made(input="y" * 70_000, previous_response_id=first["id"])
        await world.made(input="z", previous_response_id=(await world.made(previous_response_id=first["id"]))["id"])
        assert [message.content for message in world.chats[1].messages] == [*map(str, range(300)), "a", "y" * 70_000]
        listed = world.responses.list_input(first["id"], module._ListQuery(limit=100, order="asc"))
        assert [item["content"][0]["text"] for item in content(listed)["data"]] == [*map(str, range(100))]

    asyncio.run(run())


def test_input_is_listed_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        name = (await world.made(input=[{"role": "user", "content": text} for text in "abcd"]))["id"]

        def page(**query: Any) -> tuple[str, bool, dict[str, Any]]:
            found = content(world.responses.list_input(name, module._ListQuery.model_validate(query)))
            return "".join(item["content"][0]["text"] for item in found["data"]), found["has_more"], found

        assert page()[:2] == ("dcba", False)
        assert page(limit="4", order="asc")[:2] == ("abcd", False)
        texts, has_more, found = page(limit="3", order="asc")
        assert (texts, has_more) == ("abc", True)
        assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], found["data"][2]["id"])
        assert page(after=found["last_id"], order="asc")[:2] == ("d", False)
        assert page(after=found["last_id"])[:2] == ("ba", False)
        last = page(order="asc")[2]["last_id"]
        assert page(after=last, order="asc")[2] == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
        }  # fmt: skip
        with pytest.raises(ApiError, match="expected the id of an input item"):
            page(after="x")

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"store": False}, {"store": False, "stream": True}])
def test_nothing_is_stored_if_the_client_says_so(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    async def run() -> None:
        world = World(monkeypatch)
        answer = await world.create(**fields)
        if isinstance(answer, EventStream):
            async with answer._source:
                name, _ = await begun(answer)
        else:
            assert content(answer)["store"] is False
            name = content(answer)["id"]
        with pytest.raises(ApiError, match="is not stored here"):
            await world.responses.read(name)

    asyncio.run(run())


def test_a_server_that_stores_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch, max_stored_responses=0)
        assert (await world.made())["store"] is False
        for fields, param in (({"store": True}, "store"), ({"previous_response_id": "r"}, "previous_response_id")):
            with pytest.raises(ApiError, match="this server stores no responses") as raised:
                await world.create(**fields)
            assert raised.value.param == param

    asyncio.run(run())


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_response_belongs_to_the_key_that_made_it(monkeypatch: pytest.MonkeyPatch, has_keys: bool) -> None:
    async def run() -> None:
        world = World(monkeypatch, ("k", "l") if has_keys else ())
        current_request.set(RequestRecord(client="key 0"))
        name = (await world.made())["id"]
        stream = await world.create(stream=True)
        async with stream._source:
            running, _ = await begun(stream)
            current_request.set(RequestRecord(client="key 1"))
            for one in (name, running):
                if has_keys:
                    with pytest.raises(ApiError, match="is not stored here"):
                        await world.responses.read(one)
                else:
                    await world.responses.read(one)

    asyncio.run(run())


def test_errors_of_the_chat_name_the_fields_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World(monkeypatch)

        async def refused(service: Any, chat: ChatRequest) -> Any:
            raise ApiError("too long", param="messages")

        monkeypatch.setattr(module.Conversation, "of", refused)
        with pytest.raises(ApiError) as raised:
            await world.create()
        assert raised.value.param == "input"

    asyncio.run(run())
