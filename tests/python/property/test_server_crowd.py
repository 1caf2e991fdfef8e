"""Random batches of clients on a server: several adapters at once, some clients disconnect, and adapters are loaded,
swapped and unloaded. Every answer must equal the executor's for an adapter that its name meant meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import adaptrt
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()
BASE = "base"
DIRECTORIES = ("a", "b", "c", "d")
# Names that always mean the same adapter, and one whose adapter is swapped and unloaded.
STEADY, SWAPPED = ("a", "b"), "swapped"
SECONDS = 120.0
MOST_TOKENS = 24


@dataclass(frozen=True)
class Client:
    """One request, and the number of pieces after which its client disconnects."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    leaves_after: int | None


@dataclass(frozen=True)
class Change:
    """A change of the adapter `swapped`: another directory, or None to unload it."""

    directory: str | None


clients = st.builds(
    Client,
    model=st.sampled_from((BASE, *STEADY, SWAPPED)),
    prompt=st.lists(st.integers(2, SPEC.vocab_size - 1), min_size=1, max_size=40).map(tuple),
    max_tokens=st.integers(1, MOST_TOKENS),
    leaves_after=st.none() | st.integers(0, 6),
)
changes = st.builds(Change, directory=st.none() | st.sampled_from(DIRECTORIES))


@dataclass(frozen=True)
class Place:
    address: str
    engine: Path
    root: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("crowd")
    model = save_model(SPEC, base / "model")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    for seed, name in enumerate(DIRECTORIES):
        save_adapter(model, base / "root" / name, seed, strength=3.0, r=4, use_dora=seed % 2 == 1)
    engine = build_engine(model, base)
    with http_server(
        engine, "--served_model_name", BASE, "--num_threads", 1, "--adapter_root", base / "root",
        "--enable_lora_loading",
    ) as address:  # fmt: skip
        yield Place(address, engine, base / "root")


class Oracle:
    """The executor's own answers, each computed once."""

    def __init__(self, place: Place) -> None:
        self._root = place.root
        self._executor = adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1))
        for name in DIRECTORIES:
            self._executor.add_adapter(name, place.root / name)
        self._answers: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def answer(self, directory: str | None, prompt: tuple[int, ...]) -> list[int]:
        """Returns an answer of MOST_TOKENS tokens."""
        if (directory, prompt) not in self._answers:
            request = adaptrt.Request(list(prompt), MOST_TOKENS)
            id = self._executor.enqueue_request(request, adapter=directory)
            tokens = self._executor.await_responses(id)[-1].result.output_token_ids[0]
            self._answers[directory, prompt] = list(tokens[len(prompt) :])
        return self._answers[directory, prompt]

    def close(self) -> None:
        self._executor.shutdown()


@pytest.fixture(scope="module")
def oracle(place: Place) -> Iterator[Oracle]:
    made = Oracle(place)
    yield made
    made.close()


async def ask(http: httpx.AsyncClient, client: Client) -> list[int] | None:
    """Returns the tokens that arrived, or None if the adapter did not exist."""
    body = {
        "model": client.model, "prompt": list(client.prompt), "max_tokens": client.max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == httpx.codes.NOT_FOUND:
            assert client.model == SWAPPED
            return None
        assert response.status_code == httpx.codes.OK, await response.aread()
        pieces = 0
        if client.leaves_after == 0:
            return tokens
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice["token_ids"]
                pieces += 1
            if pieces == client.leaves_after:
                break
    return tokens


async def change(http: httpx.AsyncClient, wanted: Change) -> None:
    if wanted.directory is None:
        answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": SWAPPED})
        assert answer.status_code in (httpx.codes.OK, httpx.codes.NOT_FOUND), answer.text
        return
    body = {"lora_name": SWAPPED, "lora_path": wanted.directory, "load_inplace": True}
    answer = await http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text


async def run(place: Place, crowd: list[Client], wanted: list[Change]) -> list[list[int] | None]:
    """Runs all clients at once, and the changes in order at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=place.address, timeout=SECONDS, limits=limits) as http:

        async def change_all() -> None:
            for one in wanted:
                await change(http, one)

        *answers, _ = await asyncio.gather(*(ask(http, client) for client in crowd), change_all())
        await change(http, Change(None))
        return answers


def state(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{place.address}/api/state", timeout=SECONDS).json()
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    crowd=st.lists(clients, min_size=1, max_size=64),
    wanted=st.lists(changes, max_size=8),
)
def test_every_answer_is_the_executors(place: Place, oracle: Oracle, crowd: list[Client], wanted: list[Change]) -> None:
    answers = asyncio.run(run(place, crowd, wanted))
    for client, tokens in zip(crowd, answers, strict=True):
        if tokens is None:
            continue
        meant = [client.model] if client.model in STEADY else [None]
        if client.model == SWAPPED:
            meant = [one.directory for one in wanted if one.directory is not None]
        expected = [oracle.answer(directory, client.prompt)[: client.max_tokens] for directory in meant]
        if client.leaves_after is None:
            assert tokens in expected
        else:
            assert tokens in [one[: len(tokens)] for one in expected]
    # After a request that came after all clients has its answer, nothing of disconnected clients may remain.
    assert len(asyncio.run(run(place, [Client(BASE, (3,), MOST_TOKENS, None)], []))[0] or []) == MOST_TOKENS
    end = time.monotonic() + SECONDS
    while (after := state(place))["requests"] != {"running": 0, "waiting": 0} and time.monotonic() < end:
        pass
    assert after["requests"] == {"running": 0, "waiting": 0}
    # The server also lists the roots' other adapters, which must not be loaded.
    loaded = [adapter["name"] for adapter in after["adapters"]["list"] if adapter["level"] != "unloaded"]
    assert set(loaded) <= set(STEADY)
    assert all(adapter["users"] == 0 for adapter in after["adapters"]["list"])
