"""Tokenizers for the event loop. An adapter's tokenizer is read in a thread on first use."""

from __future__ import annotations

from ..runtime.adapter_tokenizers import TextTokenizer, Tokenizers
from .async_executor import AsyncExecutor
from .work import WorkKind


class ServedTokenizers:
    """The tokenizers of the model and of adapters."""

    def __init__(self, executor: AsyncExecutor, tokenizers: Tokenizers) -> None:
        self._executor = executor
        self._tokenizers = tokenizers

    @property
    def of_model(self) -> TextTokenizer:
        """The model's own tokenizer."""
        return self._tokenizers.of_model

    async def of(self, adapter: str | None) -> TextTokenizer:
        """Returns the tokenizer of an adapter's requests; None: the base model's. Raises AdaptrtError like
        Tokenizers.of.
        """
        known = self._tokenizers.known(adapter)
        if known is not None:
            return known
        return await self._executor.work.run_shared(WorkKind.FILES, adapter, self._tokenizers.of, adapter)
