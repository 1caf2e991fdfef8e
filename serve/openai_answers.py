"""What the answers of OpenAI's routes have in common: counts of tokens, log probs, and streams of events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from typing import Any, Final

from .._core import AdaptrtError
from ..runtime.adapter_tokenizers import TokenTexts
from ..runtime.text_stream import TokenText
from .errors import ApiError
from .generation import TextGeneration, TextPiece, TokenLogProbs
from .http import data_frame

DONE: Final = b"data: [DONE]\n\n"
LOWEST_LOG_PROB: Final = -9999.0
"""What vLLM has for a token that cannot come: JSON has no infinity."""


def new_id(prefix: str) -> str:
    """Names one answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage(num_prompt_tokens: int, num_answer_tokens: int) -> dict[str, int]:
    """OpenAI's counts."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
    }


class CompletionLogProbs:
    """The classic form of log probs: four lists of the same length."""

    def __init__(self, texts: TokenTexts) -> None:
        """Empty."""
        self._texts = texts
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_unscored(self, token_id: int, offset: int) -> None:
        """A token that has nothing before it to be scored by, or that the request ended before."""
        self.tokens.append(self._texts[token_id].text)
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(offset)

    def add(self, entry: TokenLogProbs, offset: int) -> None:
        """The token itself is among the most likely ones, as in vLLM, even where it is less likely."""
        log_prob = _finite(entry.log_prob)
        top = {self._texts[entry.token_id].text: log_prob}
        for token, other in entry.top:
            # Two tokens can have the same text, such as bytes that are not a letter alone: the likelier one counts, so
            # that a token is the likeliest just where its log prob is the highest.
            text = self._texts[token].text
            top[text] = max(_finite(other), top.get(text, LOWEST_LOG_PROB))
        self.tokens.append(self._texts[entry.token_id].text)
        self.token_logprobs.append(log_prob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def content(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }


def chat_log_probs(entries: Iterable[TokenLogProbs], texts: TokenTexts) -> dict[str, Any]:
    """The form that chats have."""
    return {
        "content": [
            _chat_entry(texts[entry.token_id], entry.log_prob)
            | {"top_logprobs": [_chat_entry(texts[token], log_prob) for token, log_prob in entry.top]}
            for entry in entries
        ]
    }


def _chat_entry(text: TokenText, log_prob: float) -> dict[str, Any]:
    token_bytes = None if text.data is None else list(text.data)
    return {"token": text.text, "logprob": _finite(log_prob), "bytes": token_bytes}


def _finite(log_prob: float) -> float:
    return max(log_prob, LOWEST_LOG_PROB)


async def events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Frames of a stream. An error that comes when the answer has begun is an event, the last but the end."""
    try:
        async for chunk in chunks:
            yield data_frame(chunk)
    except AdaptrtError as error:
        yield data_frame(ApiError.of(error).body())
    yield DONE


async def merged(generations: Sequence[TextGeneration], stack: AsyncExitStack) -> AsyncIterator[tuple[int, TextPiece]]:
    """The pieces of several requests' answers as they come, each with its answer's place among all of them.

    Ends what it starts with `stack`.
    """
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece.index, piece
        return
    arrived: asyncio.Queue[tuple[int, TextPiece] | AdaptrtError] = asyncio.Queue()
    first_places = accumulate((generation.num_answers for generation in generations), initial=0)
    tasks = [
        asyncio.create_task(_forward(place, generation, arrived))
        for place, generation in zip(first_places, generations, strict=False)
    ]
    stack.push_async_callback(_cancel, tasks)
    num_running = sum(generation.num_answers for generation in generations)
    while num_running:
        item = await arrived.get()
        if isinstance(item, AdaptrtError):
            raise item
        num_running -= item[1].finish_reason is not None
        yield item


async def _forward(
    first_place: int, generation: TextGeneration, arrived: asyncio.Queue[tuple[int, TextPiece] | AdaptrtError]
) -> None:
    try:
        async for piece in generation:
            arrived.put_nowait((first_place + piece.index, piece))
    except AdaptrtError as error:
        arrived.put_nowait(error)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
