"""Positions of tokens in an answer's text. A whole answer has those of the whole text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from adaptrt import FinishReason
from adaptrt.runtime.text_stream import TextStream
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.async_executor import Generation
from adaptrt.serve.generation import TextGeneration, TextPiece, TextRequest
from support.tokenizers import metaspace

TOKENIZER = metaspace()
# A run of bytes that looks like one character until its last byte; with that byte, each byte is a character.
TOKENS = [TOKENIZER.token_to_id(token) for token in ("a", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "▁hello")]


class Results:
    """A generation of one sequence whose results arrive token by token."""

    num_virtual_tokens = 0

    def __init__(self) -> None:
        self._left = [self._result(i) for i in range(len(TOKENS))]

    @staticmethod
    def _result(i: int) -> Any:
        is_last = i == len(TOKENS) - 1
        return SimpleNamespace(
            output_token_ids=[[TOKENS[i]]],
            finish_reasons=[FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED],
            is_sequence_final=is_last,
            sequence_index=0,
            log_probs=[[-float(place) for place in range(i + 1)]],
            top_log_probs=None,
            num_cached_tokens=0,
        )

    @property
    def is_over(self) -> bool:
        return not self._left

    async def wait(self) -> bool:
        return True

    def take_results(self) -> list[Any]:
        return [self._left.pop(0)] if self._left else []


def generation() -> TextGeneration:
    request = TextRequest([1], None, 10, top_log_probs=0)
    return TextGeneration(request, cast(Generation, Results()), [TextStream(Vocabulary(TOKENIZER))])


def test_whole_answers_have_the_places_of_the_whole_text() -> None:
    (piece,) = asyncio.run(generation().whole())
    assert piece.text == "a\ufffd\ufffd\ufffd\ufffd hello"
    assert [(entry.token_id, entry.text_offset) for entry in piece.log_probs] == list(
        zip(TOKENS, [0, 1, 2, 3, 4, 5], strict=True)
    )
    assert [entry.log_prob for entry in piece.log_probs] == [-float(place) for place in range(len(TOKENS))]


def test_streamed_pieces_have_the_places_that_are_known_then() -> None:
    async def collect() -> list[TextPiece]:
        return [piece async for piece in generation()]

    pieces = asyncio.run(collect())
    assert "".join(piece.text for piece in pieces) == "a\ufffd\ufffd\ufffd\ufffd hello"
    assert [entry.text_offset for piece in pieces for entry in piece.log_probs] == [0, 1, 1, 1, 2, 5]
