"""Event streams, including failing ones, and the two formats of log probs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from adaptrt import RequestError
from adaptrt.runtime.adapter_tokenizers import TokenTexts
from adaptrt.runtime.token_log_probs import TokenLogProbs
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.generation import TextGeneration, TextPiece
from adaptrt.serve.openai_answers import (
    DONE,
    CompletionLogProbs,
    chat_log_probs,
    events,
    merged,
)
from adaptrt.serve.openai_routes import _card
from support.tokenizers import byte_level

TOKENIZER = byte_level()
TEXTS = TokenTexts(Vocabulary(TOKENIZER))
HELLO, HALF, OTHER_HALF = (TOKENIZER.token_to_id(token) for token in ("hello", "Ĥ", "¬"))


class Pieces:
    """A request with fixed answers."""

    def __init__(self, *texts: str, error: RequestError | None = None, ends: bool = True, num_answers: int = 1) -> None:
        self.texts, self.error, self.ends, self.num_answers = texts, error, ends, num_answers
        self.was_cancelled = False
        self.turn = asyncio.Lock()

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        for text in self.texts:
            for index in range(self.num_answers):
                await asyncio.sleep(0)
                yield TextPiece(text, (), index=index)
        if self.error is not None:
            raise self.error
        if not self.ends:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        for index in range(self.num_answers):
            yield TextPiece("", (), finish_reason="stop", index=index)


async def collect(*answers: Pieces) -> list[tuple[int, str]]:
    async with AsyncExitStack() as stack:
        return [(place, piece.text) async for place, piece in merged(cast(list[TextGeneration], answers), stack)]


@pytest.mark.parametrize("count", [1, 3])
def test_the_pieces_of_all_answers_come_each_in_its_order(count: int) -> None:
    found = asyncio.run(collect(*(Pieces("a", "b") for _ in range(count))))
    for place in range(count):
        assert [text for i, text in found if i == place] == ["a", "b", ""]
    assert len(found) == 3 * count


def test_the_requests_of_one_client_make_pieces_in_turns() -> None:
    answers = [Pieces("a"), Pieces("b"), Pieces("c")]
    asyncio.run(collect(*answers))
    assert len({id(answer.turn) for answer in answers}) == 1


@pytest.mark.parametrize("nums", [[3], [2, 1, 3]])
def test_the_answers_of_a_request_follow_each_other(nums: list[int]) -> None:
    found = asyncio.run(collect(*(Pieces(str(i), num_answers=n) for i, n in enumerate(nums))))
    expected = [str(i) for i, n in enumerate(nums) for _ in range(n)]
    for place, text in enumerate(expected):
        assert [found_text for i, found_text in found if i == place] == [text, ""]
    assert len(found) == 2 * len(expected)


def test_one_answer_that_fails_ends_the_others() -> None:
    waiting = Pieces("a", ends=False)
    with pytest.raises(RequestError, match="broken"):
        asyncio.run(collect(waiting, Pieces("b", error=RequestError("broken"))))
    assert waiting.was_cancelled


def test_an_error_in_the_middle_is_an_event() -> None:
    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield {"a": "€"}
        raise RequestError("broken")

    async def frames() -> list[bytes]:
        return [frame async for frame in events(chunks())]

    first, error, done = asyncio.run(frames())
    assert first == 'data: {"a":"€"}\n\n'.encode()
    assert json.loads(error.removeprefix(b"data: "))["error"] == {
        "message": "broken", "type": "BadRequestError", "param": None, "code": 400,
    }  # fmt: skip
    assert done == DONE


def test_the_likeliest_of_tokens_with_one_text_counts() -> None:
    """A token must be the likeliest exactly if its log prob is the highest, which evaluations rely on."""
    listed = CompletionLogProbs(TEXTS)
    listed.add(TokenLogProbs(HALF, -2.0, ((OTHER_HALF, -0.5), (HELLO, -1.0))), 3)
    listed.add(TokenLogProbs(HELLO, -1.0, ((HELLO, -1.0),)), 4)
    assert listed.content() == {
        "tokens": ["\ufffd", "hello"],
        "token_logprobs": [-2.0, -1.0],
        "top_logprobs": [{"\ufffd": -0.5, "hello": -1.0}, {"hello": -1.0}],
        "text_offset": [3, 4],
    }


def test_impossible_tokens_have_a_finite_log_probability() -> None:
    listed = CompletionLogProbs(TEXTS)
    listed.add(TokenLogProbs(HELLO, -math.inf, ()), 0)
    assert listed.content()["token_logprobs"] == [-9999.0]


def test_chats_have_the_bytes_of_tokens() -> None:
    (entry,) = chat_log_probs([TokenLogProbs(HELLO, -1.0, ((HALF, -0.5),))], TEXTS)["content"]
    assert entry == {
        "token": "hello",
        "logprob": -1.0,
        "bytes": list(b"hello"),
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0x82]}],
    }


@pytest.mark.parametrize(("parent", "longest"), [(None, 64), ("base", None)])
def test_the_card_of_a_model_is_vllms(parent: str | None, longest: int | None) -> None:
    card = _card("poet", 7, root=Path("/models/poet"), parent=parent, max_model_len=longest)
    (permission,) = card.pop("permission")
    assert card == {
        "id": "poet", "object": "model", "created": 7, "owned_by": "adaptrt", "root": "/models/poet", "parent": parent,
        "max_model_len": longest,
    }  # fmt: skip
    assert permission.pop("id").startswith("modelperm-")
    assert permission == {
        "object": "model_permission", "created": 7, "allow_create_engine": False, "allow_sampling": True,
        "allow_logprobs": True, "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
