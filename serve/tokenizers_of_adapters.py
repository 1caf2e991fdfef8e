"""Tokenizers beside the loop: those of adapters are read when their first text comes."""

from __future__ import annotations

from ..runtime.adapter_tokenizers import TextTokenizer, Tokenizers
from .async_executor import AsyncExecutor
from .work import WorkKind


class ServedTokenizers:
    """The model's tokenizer, and adapters' own."""

    def __init__(self, executor: AsyncExecutor, tokenizers: Tokenizers) -> None:
        self._executor = executor
        self._tokenizers = tokenizers

    @property
    def of_model(self) -> TextTokenizer:
        """For what belongs to no adapter."""
        return self._tokenizers.of_model

    async def of(self, adapter: str | None) -> TextTokenizer:
        """That of an adapter's requests, or of the base's. Raises AdaptrtError as Tokenizers.of does."""
        known = self._tokenizers.known(adapter)
        if known is not None:
            return known
        return await self._executor.work.run_shared(WorkKind.FILES, adapter, self._tokenizers.of, adapter)
