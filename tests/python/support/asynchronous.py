"""Runs a test's coroutine with an executor on an event loop, as the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import adaptrt
from adaptrt.serve.async_executor import AsyncExecutor


def run(executor: adaptrt.Executor, body: Callable[[AsyncExecutor], Awaitable[Any]]) -> None:
    """Runs `body` with an AsyncExecutor and closes it."""

    async def main() -> None:
        asynchronous = AsyncExecutor(executor)
        asynchronous.start()
        try:
            await body(asynchronous)
        finally:
            await asynchronous.close()

    asyncio.run(main())
