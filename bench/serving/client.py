"""Streams completions from an OpenAI-compatible server and says when each token came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Stream:
    """One answer: when it was asked for, and when pieces of it came, in seconds of one clock."""

    asked: float
    arrivals: tuple[float, ...]
    num_tokens: int

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.asked


@dataclass(frozen=True)
class Crowd:
    """Requests that are sent together: a model's or adapter's name and a prompt each."""

    models: Sequence[str | None]
    prompts: Sequence[Sequence[int]]
    max_tokens: int


def ask_server(address: str, crowd: Crowd) -> list[Stream]:
    """All of a crowd at once. Raises httpx.HTTPError."""
    return asyncio.run(_ask_all(address, crowd))


async def _ask_all(address: str, crowd: Crowd) -> list[Stream]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        asked = zip(crowd.models, crowd.prompts, strict=True)
        return await asyncio.gather(*(_ask(client, str(model), prompt, crowd.max_tokens) for model, prompt in asked))


async def _ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int) -> Stream:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    asked = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise httpx.HTTPStatusError((await response.aread()).decode(), request=response.request, response=response)
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            arrivals.append(time.perf_counter())
            # Parsed once it is over: the client is to take as little of the machine as it can.
            last = line
    usage = json.loads(last.removeprefix("data: "))["usage"]
    return Stream(asked, tuple(arrivals), usage["completion_tokens"])
