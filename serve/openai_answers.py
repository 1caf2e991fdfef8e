"""Shared parts of OpenAI's answers: token counts, log probs, and event streams."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from typing import Any, Final

from .._core import AdaptrtError
from ..runtime.adapter_tokenizers import TokenTexts
from ..runtime.token_log_probs import TokenLogProbs
from .errors import ApiError
from .generation import TextGeneration, TextPiece
from .json_answer import Items, frame
from .records import current_request
from .time_slices import TimeSlices

MANY_PIECES: Final = 256
"""Maximum number of pieces of several requests that wait for the client; each request gathers further ones itself."""
_TASKS_AT_ONCE: Final = 16
"""Number of tasks of one request that begin in the same iteration of the loop."""
DONE: Final = b"data: [DONE]\n\n"
MANY_ENTRIES: Final = 32
"""Tokens; log probs of more tokens are written in slices."""
LOWEST_LOG_PROB: Final = -9999.0
"""vLLM's value for an impossible token: JSON has no infinity."""


def new_id(prefix: str) -> str:
    """Makes a unique id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def answer_id(prefix: str) -> str:
    """Makes the id of an answer: with the id that the client gave to its request, or else a unique one."""
    record = current_request.get()
    return new_id(prefix) if record is None or not record.is_named else f"{prefix}-{record.id}"


def usage(
    num_prompt_tokens: int, num_answer_tokens: int, num_reasoning_tokens: int | None = None, *, num_cached_tokens: int
) -> dict[str, Any]:
    """Returns the token counts in OpenAI's format.

    num_reasoning_tokens: part of the answer; None: not known. num_cached_tokens: part of the prompt.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return counts


class CompletionLogProbs:
    """Log probs in the format of completions: four lists of the same length."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool = False) -> None:
        """Makes empty lists. as_ids: tokens are named by their ids."""
        self._name = _id_name if as_ids else lambda token: texts[token].text
        self._tokens: list[tuple[int, int]] = []
        self._entries: list[TokenLogProbs | None] = []

    def add_unscored(self, token_id: int, offset: int) -> None:
        """Adds a token without a log prob: the first token, or one that was not computed before the request ended."""
        self._tokens.append((token_id, offset))
        self._entries.append(None)

    def add(self, entry: TokenLogProbs, offset: int) -> None:
        """Adds a token. Like in vLLM, it is listed among the most likely tokens even if it is less likely."""
        self._tokens.append((entry.token_id, offset))
        self._entries.append(entry)

    def content(self) -> dict[str, Any]:
        """Returns the lists in OpenAI's format."""
        lists: dict[str, Iterator[Any]] = {
            "text_offset": (offset for _, offset in self._tokens),
            "token_logprobs": (None if entry is None else _finite(entry.log_prob) for entry in self._entries),
            "tokens": (self._name(token) for token, _ in self._tokens),
            "top_logprobs": (None if entry is None else self._top(entry) for entry in self._entries),
        }
        is_long = len(self._entries) > MANY_ENTRIES
        return {name: Items(values) if is_long else list(values) for name, values in lists.items()}

    def _top(self, entry: TokenLogProbs) -> dict[str, float]:
        top = {self._name(entry.token_id): _finite(entry.log_prob)}
        for token, other in entry.top:
            # Two tokens can have the same text, for example single bytes of a character. The likelier one counts, so
            # that a token is listed as the likeliest exactly if it is.
            text = self._name(token)
            top[text] = max(_finite(other), top.get(text, LOWEST_LOG_PROB))
        return top


def chat_log_probs(entries: Sequence[TokenLogProbs], texts: TokenTexts, *, as_ids: bool = False) -> dict[str, Any]:
    """Returns log probs in the format of chats. as_ids: tokens are named by their ids."""
    made = (token_log_probs(entry, texts, as_ids=as_ids) for entry in entries)
    return {"content": Items(made) if len(entries) > MANY_ENTRIES else list(made)}


def token_log_probs(entry: TokenLogProbs, texts: TokenTexts, *, as_ids: bool = False) -> dict[str, Any]:
    """Returns one token's log probs in the format of chats. as_ids: tokens are named by their ids."""

    def made(token: int, log_prob: float) -> dict[str, Any]:
        text = texts[token]
        token_bytes = None if text.data is None else list(text.data)
        name = _id_name(token) if as_ids else text.text
        return {"token": name, "logprob": _finite(log_prob), "bytes": token_bytes}

    top = [made(token, log_prob) for token, log_prob in entry.top]
    return made(entry.token_id, entry.log_prob) | {"top_logprobs": top}


def prompt_log_prob_entries(
    prompt: Sequence[int], scored: Sequence[TokenLogProbs] | None, texts: TokenTexts
) -> list[Any] | Items:
    """Returns the log probs of a prompt's tokens in vLLM's format: null for tokens that have none, as the first.

    scored: entries of the last tokens; None: the request ended before they were computed.
    """
    entries = scored or ()
    num_unscored = len(prompt) - len(entries)
    made = (None if i < num_unscored else _prompt_entry(entries[i - num_unscored], texts) for i in range(len(prompt)))
    return Items(made) if len(prompt) > MANY_ENTRIES else list(made)


def _prompt_entry(entry: TokenLogProbs, texts: TokenTexts) -> dict[str, Any]:
    """Returns the token and the most likely tokens by id. The rank of a token that is less likely is null."""
    listed = {token: (log_prob, rank) for rank, (token, log_prob) in enumerate(entry.top, 1)}
    ordered = {entry.token_id: listed.get(entry.token_id, (entry.log_prob, None))} | listed
    return {
        str(token): {"logprob": _finite(log_prob), "rank": rank, "decoded_token": texts[token].text}
        for token, (log_prob, rank) in ordered.items()
    }


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _finite(log_prob: float) -> float:
    return max(log_prob, LOWEST_LOG_PROB)


async def events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yields the frames of a stream. An error after the answer has begun is an event before the end."""
    try:
        async for chunk in chunks:
            yield await frame(chunk)
    except AdaptrtError as error:
        yield await frame(ApiError.of(error).body())
    yield DONE


async def merged(generations: Sequence[TextGeneration], stack: AsyncExitStack) -> AsyncIterator[tuple[int, TextPiece]]:
    """Yields the pieces of several requests as they arrive, each with the index of its answer among all answers.

    The tasks that it starts end with `stack`.
    """
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece.index, piece
        return
    arrived: asyncio.Queue[tuple[int, TextPiece] | AdaptrtError] = asyncio.Queue(MANY_PIECES)
    # Only one generation makes pieces in each iteration of the loop.
    turn = asyncio.Lock()
    for generation in generations:
        generation.turn = turn
    first_places = accumulate((generation.num_answers for generation in generations), initial=0)
    tasks: list[asyncio.Task[None]] = []
    stack.push_async_callback(_cancel, tasks)
    for place, generation in zip(first_places, generations, strict=False):
        tasks.append(asyncio.create_task(_forward(place, generation, arrived)))
        if len(tasks) % _TASKS_AT_ONCE == 0:
            await asyncio.sleep(0)
    slices = TimeSlices()
    num_running = sum(generation.num_answers for generation in generations)
    while num_running:
        item = await arrived.get()
        if isinstance(item, AdaptrtError):
            raise item
        num_running -= item[1].finish_reason is not None
        yield item
        if not arrived.empty():
            await slices.pause()


async def _forward(
    first_place: int, generation: TextGeneration, arrived: asyncio.Queue[tuple[int, TextPiece] | AdaptrtError]
) -> None:
    try:
        async for piece in generation:
            await arrived.put((first_place + piece.index, piece))
    except AdaptrtError as error:
        await arrived.put(error)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
