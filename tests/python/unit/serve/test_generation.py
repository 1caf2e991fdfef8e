"""Pieces of an answer, made from the executor's results in their order, one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import adaptrt
from adaptrt.runtime.text_stream import TextStream
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.async_executor import MANY_RESULTS, AsyncExecutor, Generation
from adaptrt.serve.generation import TextGeneration, TextPiece, TextRequest
from support.asynchronous import run
from support.models import ModelSpec
from support.serving import build_random_engine
from support.tokenizers import byte_level

SPEC = ModelSpec(vocab_size=272, max_position_embeddings=2048)
NUM_TOKENS = 4 * MANY_RESULTS
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_engine(SPEC, tmp_path_factory.mktemp("generation"), max_seq_len=1024)[1]


@pytest.fixture
def executor(engine: Path) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        yield made


def start(asynchronous: AsyncExecutor, num_answers: int, num_tokens: int = NUM_TOKENS) -> TextGeneration:
    sampling = adaptrt.SamplingConfig(seed=3, top_k=0, top_p=1.0, temperature=1.0)
    output = adaptrt.OutputConfig(exclude_input_from_output=True, return_log_probs=True, top_log_probs=2)
    asked = adaptrt.Request(
        PROMPT, num_tokens, streaming=True, sampling_config=sampling, output_config=output,
        num_return_sequences=num_answers,
    )  # fmt: skip
    request = TextRequest(PROMPT, None, num_tokens, top_log_probs=2, num_answers=num_answers)
    texts = [TextStream(Vocabulary(byte_level())) for _ in range(num_answers)]
    return TextGeneration(request, asynchronous.submit(asked), texts)


async def until_idle(asynchronous: AsyncExecutor) -> None:
    while asynchronous.num_running:
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_answers", [1, 3])
def test_pieces_that_are_read_late_are_the_same(executor: adaptrt.Executor, num_answers: int) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        at_once = await start(asynchronous, num_answers).whole()
        assert [len(piece.token_ids) for piece in at_once] == [NUM_TOKENS] * num_answers
        generation = start(asynchronous, num_answers)
        await until_idle(asynchronous)
        assert await generation.whole() == at_once
        # The first piece is read when it arrives.
        generation = start(asynchronous, num_answers)
        pieces = generation.__aiter__()
        first = [await anext(pieces)]
        await until_idle(asynchronous)
        rest = [piece async for piece in pieces]
        for index, whole in enumerate(at_once):
            own = [piece for piece in (*first, *rest) if piece.index == index]
            assert "".join(piece.text for piece in own) == whole.text
            assert tuple(token for piece in own for token in piece.token_ids) == whole.token_ids
            assert [entry.log_prob for piece in own for entry in piece.log_probs] == [
                entry.log_prob for entry in whole.log_probs
            ]
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]

    run(executor, body)


def test_pieces_are_made_when_it_is_the_requests_turn(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        # If no task reads, more results become pieces without the lock.
        generation = start(asynchronous, 1, MANY_RESULTS - 1)
        turn = asyncio.Lock()
        generation.turn = turn
        await turn.acquire()
        reading = asyncio.create_task(generation.whole())
        await until_idle(asynchronous)
        await asyncio.sleep(0.01)
        assert not reading.done()
        turn.release()
        (whole,) = await reading
        assert len(whole.token_ids) == MANY_RESULTS - 1

    run(executor, body)


def test_results_of_an_answer_that_has_ended_end_no_other() -> None:
    tokenizer = byte_level()
    owner: Any = SimpleNamespace(release=lambda _: None)

    def result(index: int, text: str, finish: adaptrt.FinishReason | None = None) -> Any:
        made = SimpleNamespace(
            sequence_index=index, output_token_ids=[tokenizer.encode(text).ids], is_sequence_final=finish is not None,
            finish_reasons=[finish], is_final=finish is not None, num_cached_tokens=0,
        )  # fmt: skip
        return SimpleNamespace(has_error=lambda: False, result=made)

    async def main() -> None:
        results = Generation(owner, 1)
        texts = [TextStream(Vocabulary(tokenizer), ("!",)) for _ in range(2)]
        generation = TextGeneration(TextRequest(PROMPT, None, 9, stop=("!",), num_answers=2), results, texts)
        pieces: list[TextPiece] = []

        async def read() -> None:
            async for piece in generation:
                pieces.append(piece)

        reading = asyncio.create_task(read())
        results.accept(result(0, "a!"))
        while not pieces:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # it waits for results
        async with generation.turn:
            results.accept(result(0, "b"))
            await asyncio.sleep(0.01)  # it waits for its turn
            for _ in range(MANY_RESULTS - 1):
                results.accept(result(0, "c"))
        await asyncio.sleep(0.01)
        assert not reading.done()
        results.accept(result(1, "d", adaptrt.FinishReason.LENGTH))
        await reading
        assert [(piece.index, piece.text, piece.finish_reason) for piece in pieces] == [
            (0, "a", "stop"),
            (1, "d", "length"),
        ]

    asyncio.run(asyncio.wait_for(main(), 60))
