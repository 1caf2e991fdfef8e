"""Many adapters through a small cache, from many threads, with random cancellations; and stable memory."""

from __future__ import annotations

import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import adaptrt
from support.memory import CAN_MEASURE, held
from support.models import ModelSpec
from support.serving import build_random_engine

SPEC = ModelSpec()
NUM_ADAPTERS = 1000
NUM_THREADS = 4
# Room for about twelve adapters on the host level and fewer on the device level, so traffic always causes evictions.
CACHE = adaptrt.PeftCacheConfig(host_cache_size=30_000, num_device_module_layer=150, max_adapter_size=4)
SECONDS = 6.0
# Statistics and buffers vary by some KB between rounds; a leak of 16 bytes per request exceeds that.
HEAP_SLACK = 64 << 10
OBJECT_SLACK = 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> adaptrt.LoadedEngine:
    directory = tmp_path_factory.mktemp("stress")
    return adaptrt.load_engine(build_random_engine(SPEC, directory, max_lora_rank=4, tokens_per_block=4)[1])


@pytest.fixture
def executor(engine: adaptrt.LoadedEngine) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(
        max_beam_width=1,
        enable_chunked_context=True,
        max_num_tokens=16,
        num_threads=1,
        peft_cache_config=CACHE,
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=256),
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
    )
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        yield made


def adapter(task_id: int) -> adaptrt.LoraConfig:
    rng = np.random.default_rng(task_id)
    rank = task_id % 4 + 1
    weights = rng.normal(0, 0.3, (2, rank * (SPEC.hidden_size + SPEC.num_attention_heads * SPEC.head_dim)))
    rows = np.array([[1, 0, rank], [4, 1, rank]], np.int32)
    return adaptrt.LoraConfig(task_id, weights.astype(np.float32), rows)


def ask(executor: adaptrt.Executor, task_id: int, cancel: bool = False) -> tuple[adaptrt.FinishReason, list[int]]:
    """Sends only the task_id, then the weights if they are not cached; retries while other requests use the whole
    cache."""
    prompt = [task_id % 50 + 2, 7, 9]
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    lora: adaptrt.LoraConfig | None = adaptrt.LoraConfig(task_id) if task_id else None
    while True:
        try:
            request_id = executor.enqueue_request(adaptrt.Request(prompt, 6, lora_config=lora, output_config=output))
            break
        except adaptrt.PeftTaskNotCachedError:
            lora = adapter(task_id)
        except adaptrt.LoraCacheFullError:
            time.sleep(0.001)
    if cancel:
        executor.cancel_request(request_id)
    (response,) = executor.await_responses(request_id, 60.0)
    assert not response.has_error(), response.error_msg
    return response.result.finish_reasons[0], response.result.output_token_ids[0]


def test_a_thousand_adapters_through_a_small_cache(executor: adaptrt.Executor, engine: adaptrt.LoadedEngine) -> None:
    answers: queue.SimpleQueue[tuple[int, adaptrt.FinishReason, list[int]]] = queue.SimpleQueue()
    failures: list[BaseException] = []
    end = time.monotonic() + SECONDS

    def work(seed: int) -> None:
        choice = random.Random(seed)
        try:
            for index in range(NUM_ADAPTERS // NUM_THREADS):
                if time.monotonic() > end:
                    return
                # Mostly new adapters, sometimes old ones, and requests without an adapter.
                fresh = 1 + seed + index * NUM_THREADS
                task_id = choice.choice([fresh, fresh, choice.randint(1, fresh), 0])
                answers.put((task_id, *ask(executor, task_id, cancel=choice.random() < 0.2)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    received = [answers.get() for _ in range(answers.qsize())]

    stats = executor.lora_cache_stats()
    assert stats.host_evictions > 0
    assert stats.device_evictions > 0
    assert stats.host_bytes_used == sum(entry.host_bytes for entry in executor.list_adapters())
    assert all(entry.users == 0 for entry in executor.list_adapters())
    assert executor.get_num_responses_ready() == 0
    # Each answer equals the one that its adapter gives alone; a cancelled answer is its beginning.
    with adaptrt.Executor(engine) as alone:
        expected = {task_id: ask(alone, task_id)[1] for task_id in {task_id for task_id, _, _ in received}}
    for task_id, reason, tokens in received:
        assert tokens == expected[task_id][: len(tokens)]
        assert len(tokens) == 6 or reason == adaptrt.FinishReason.CANCELLED


@pytest.mark.skipif(not CAN_MEASURE, reason="needs glibc 2.33")
def test_memory_does_not_grow(executor: adaptrt.Executor) -> None:
    output = adaptrt.OutputConfig(
        return_log_probs=True, return_context_logits=True, return_generation_logits=True, top_log_probs=3,
        return_prompt_log_probs=True,
    )  # fmt: skip
    shared = adapter(1)

    def run_requests(count: int) -> None:
        ids = [
            executor.enqueue_request(
                adaptrt.Request(
                    [3 + i % 50] * 20, 6, streaming=i % 2 == 0, output_config=output, stop_words=[[1, 1]],
                    lora_config=shared if i % 3 else None, allotted_time_ms=600_000,
                )
            )
            for i in range(count)
        ]  # fmt: skip
        for i, request_id in enumerate(ids):
            if i % 5 == 0:
                executor.cancel_request(request_id)
        for request_id in ids:
            while not executor.await_responses(request_id)[-1].result.is_final:
                pass
        # Refused requests leave no memory behind either.
        for _ in range(count):
            with pytest.raises(adaptrt.RequestError):
                executor.enqueue_request(adaptrt.Request([99], 1))

    # Run until the statistics are full and all buffers have their final size.
    for _ in range(5):
        run_requests(400)
    before = held()
    for _ in range(10):
        run_requests(400)
    grown = held() - before
    assert grown.heap < HEAP_SLACK
    assert grown.blocks < OBJECT_SLACK
    assert grown.objects < OBJECT_SLACK
    assert executor.get_num_responses_ready() == 0


def test_replaced_adapters_give_their_memory_back(executor: adaptrt.Executor) -> None:
    weights, rows = adapter(1).weights, adapter(1).config
    used = set()
    for index in range(300):
        changed = weights + np.float32(index)
        executor.put_adapter(adaptrt.LoraConfig(1, changed, rows, replace=True))
        stats = executor.lora_cache_stats()
        used.add((stats.host_adapters, stats.host_bytes_used))
    assert len(used) == 1
    assert used.pop()[0] == 1


def test_requests_may_change_while_they_are_enqueued(executor: adaptrt.Executor) -> None:
    request = adaptrt.Request([1] * 200, 1)
    end = threading.Event()

    def change() -> None:
        for index in itertools.count():
            request.input_token_ids = [2] * (1 + index % 200)
            request.stop_words = [[index % 60]] * (index % 30)
            if end.is_set():
                return

    threads = [threading.Thread(target=change) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(1500):
            request_id = executor.enqueue_request(request)
            (response,) = executor.await_responses(request_id, 60.0)
            assert 2 <= len(response.result.output_token_ids[0]) <= 201
    finally:
        end.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
