"""The executor on an asyncio loop: order of results, cancelled requests, and the executor's end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

import adaptrt
from adaptrt.serve.async_executor import MANY_RESULTS, AsyncExecutor, Generation
from adaptrt.serve.work import WorkKind
from support.asynchronous import run
from support.models import ModelSpec
from support.serving import build_random_engine

# Long enough not to end while other work blocks the event loop.
LONG = 12000
MANY = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> adaptrt.LoadedEngine:
    spec = ModelSpec(max_position_embeddings=16384)
    return adaptrt.load_engine(build_random_engine(spec, tmp_path_factory.mktemp("async"), max_seq_len=16384)[1])


@pytest.fixture
def executor(engine: adaptrt.LoadedEngine) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(num_threads=1, max_batch_size=1, max_queue_size=8)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        yield made


def request(first: int = 3, max_tokens: int = 6) -> adaptrt.Request:
    return adaptrt.Request([first, 4, 5], max_tokens, streaming=True)


async def tokens_of(generation: Generation) -> list[int]:
    tokens: list[int] = []
    async with generation:
        while results := await generation.next_results():
            tokens += [token for result in results for token in result.output_token_ids[0]]
    return tokens


async def until_idle(asynchronous: AsyncExecutor) -> None:
    """Waits until the last response of every request has arrived."""
    while asynchronous.num_running:
        await asyncio.sleep(0)


def expected(executor: adaptrt.Executor, first: int, max_tokens: int) -> list[int]:
    responses = executor.await_responses(executor.enqueue_request(adaptrt.Request([first, 4, 5], max_tokens)))
    return list(responses[-1].result.output_token_ids[0][3:])


def test_results_that_nobody_waits_for_are_handed_over_in_batches(executor: adaptrt.Executor) -> None:
    num_tokens = 3 * MANY_RESULTS + 5
    alone = expected(executor, 3, num_tokens)

    async def body(asynchronous: AsyncExecutor) -> None:
        generation = asynchronous.submit(request(3, num_tokens))
        tokens: list[int] = []
        sizes: list[int] = []

        def take(results: list[adaptrt.Result]) -> None:
            sizes.append(len(results))
            tokens.extend(token for result in results for token in result.output_token_ids[0])

        generation.on_backlog = take
        await until_idle(asynchronous)
        assert sizes == [MANY_RESULTS] * 3
        assert tokens + await tokens_of(generation) == alone
        assert sizes == [MANY_RESULTS] * 3

    run(executor, body)


def test_many_requests_at_once_get_their_own_tokens(executor: adaptrt.Executor) -> None:
    alone = {first: expected(executor, first, 4 + first) for first in range(2, 10)}

    async def body(asynchronous: AsyncExecutor) -> None:
        generations = {first: asynchronous.submit(request(first, 4 + first)) for first in alone}
        assert asynchronous.num_running == len(alone)
        together = await asyncio.gather(*(tokens_of(generation) for generation in generations.values()))
        assert dict(zip(alone, together, strict=True)) == alone
        assert asynchronous.num_running == 0

    run(executor, body)


def test_a_generation_that_is_left_early_frees_its_request(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        async with asynchronous.submit(request(max_tokens=LONG)) as generation:
            assert await generation.next_results()
        await until_idle(asynchronous)
        assert executor.get_latest_iteration_stats()[-1].iter < LONG  # it did not run to its end
        assert await tokens_of(asynchronous.submit(request()))  # other requests continue

    run(executor, body)


def test_a_cancelled_task_frees_its_request(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        generation = asynchronous.submit(request(max_tokens=LONG))
        task = asyncio.create_task(tokens_of(generation))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(asynchronous)

    run(executor, body)


def test_a_request_that_is_refused_leaves_nothing(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        with pytest.raises(adaptrt.RequestError, match="max_tokens"):
            asynchronous.submit(request(max_tokens=0))
        assert asynchronous.num_running == 0

    run(executor, body)


def test_requests_fail_when_the_executor_ends(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        # There are enough requests that the last ones still wait at the shutdown.
        generations = [asynchronous.submit(request(max_tokens=LONG)) for _ in range(MANY)]
        await generations[0].next_results()
        await asyncio.to_thread(executor.shutdown)
        with pytest.raises((adaptrt.RequestError, adaptrt.ExecutorClosedError)):
            await tokens_of(generations[-1])
        await until_idle(asynchronous)
        with pytest.raises(adaptrt.ExecutorClosedError):
            asynchronous.submit(request())

    run(executor, body)


def test_work_beside_the_loop_keeps_its_exceptions(executor: adaptrt.Executor) -> None:
    async def body(asynchronous: AsyncExecutor) -> None:
        assert await asynchronous.work.run(WorkKind.TEXTS, sum, [1, 2]) == 3
        with pytest.raises(adaptrt.AdapterError, match="no adapter named 'x'"):
            await asynchronous.work.run(WorkKind.ADAPTERS, executor.load_adapter, "x")

    run(executor, body)


def test_an_executor_that_has_ended_is_not_kept(engine: adaptrt.LoadedEngine) -> None:
    async def main() -> weakref.ref[adaptrt.Executor]:
        executor = adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1))
        asynchronous = AsyncExecutor(executor)
        asynchronous.start()
        cut = asynchronous.submit(request(max_tokens=LONG))
        await asynchronous.close()
        with pytest.raises(adaptrt.AdaptrtError):  # its own response may precede the executor's end
            await tokens_of(cut)
        with pytest.raises(adaptrt.ExecutorClosedError):
            asynchronous.submit(request())
        return weakref.ref(executor)

    # A reference cycle would keep the memory until the next garbage collection.
    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
