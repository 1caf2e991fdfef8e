"""Checks the proofs of adapters with requests of the server's executor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .._core import Request, Result
from ..runtime.adapter_proof import ProofCheck
from ..runtime.adapter_tokenizers import Tokenizers
from ..runtime.named_adapter import NamedAdapter
from .async_executor import AsyncExecutor, Generation


class ServedProofs:
    """Checks adapters before their names are known. Their requests go before all others in the queue."""

    def __init__(self, executor: AsyncExecutor, tokenizers: Tokenizers) -> None:
        """Must be called on the loop."""
        self._executor = executor
        self._tokenizers = tokenizers
        self._loop = asyncio.get_running_loop()

    def check(self, adapter: NamedAdapter) -> None:
        """Raises AdapterError if the adapter's proof fails. Waits for the loop: call it in another thread."""

        def ask(requests: Sequence[Request]) -> list[Result]:
            return asyncio.run_coroutine_threadsafe(self._results(requests, adapter.name), self._loop).result()

        ProofCheck(self._executor.executor, self._tokenizers, ask)(adapter)

    async def _results(self, requests: Sequence[Request], name: str) -> list[Result]:
        generations: list[Generation] = []
        try:
            for index, request in enumerate(requests):
                request.priority = 1.0
                generations.append(self._executor.submit(request, name if index % 2 == 0 else None))
            return [(await generation.next_results())[-1] for generation in generations]
        finally:
            for generation in generations:
                generation.cancel()
