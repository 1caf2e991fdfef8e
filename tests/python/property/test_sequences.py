"""Each sequence of a request equals, bit for bit, a request with its seed and one sequence: in any batch, chunking and
cache."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine, crowd_fields

SPEC = ModelSpec(vocab_size=101)
ADAPTERS = [{"r": 4}, {"r": 7, "use_dora": True}]
PROMPTS = [[5], [9, 8, 7], list(range(2, 34)), list(range(2, 41)), [*range(2, 18), 3, 3]]
MAX_TOKENS = 12
STOP = 7


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request to an executor."""

    prompt: int
    adapter: int | None
    n: int
    seed: int
    max_tokens: int
    streaming: bool
    cancel: bool


@dataclasses.dataclass
class Sequence:
    """The result of one sequence."""

    tokens: list[int]
    log_probs: list[float]
    logits: bytes
    reason: adaptrt.FinishReason


class Service:
    """An engine and its adapters; the result of each sequence alone is computed once."""

    def __init__(self, engine: Path, adapters: list[Path]) -> None:
        self.engine = adaptrt.load_engine(engine)
        self.lora = [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(adapters)]
        self.alone = cache(self._alone)

    def executor(self, **fields: Any) -> adaptrt.Executor:
        return adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))

    def request(self, ask: Ask) -> adaptrt.Request:
        return adaptrt.Request(
            PROMPTS[ask.prompt],
            ask.max_tokens,
            streaming=ask.streaming,
            sampling_config=adaptrt.SamplingConfig(
                seed=ask.seed, top_p=0.95, temperature=1.3, repetition_penalty=1.1, num_return_sequences=ask.n
            ),
            output_config=adaptrt.OutputConfig(
                return_log_probs=True, return_generation_logits=True, exclude_input_from_output=True
            ),
            stop_words=[[STOP]],
            lora_config=None if ask.adapter is None else self.lora[ask.adapter],
        )

    def _alone(self, ask: Ask) -> Sequence:
        with self.executor(num_threads=1) as executor:
            return collect(executor, executor.enqueue_request(self.request(ask)), 1)[0]


def collect(executor: adaptrt.Executor, request_id: int, n: int) -> list[Sequence]:
    """Waits for the request's end and returns its sequences; checks that each sequence's last response is marked
    final."""
    parts: list[list[adaptrt.Result]] = [[] for _ in range(n)]
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id, 60.0):
            assert not response.has_error(), response.error_msg
            of_sequence = parts[response.result.sequence_index]
            assert not (of_sequence and of_sequence[-1].is_sequence_final)
            of_sequence.append(response.result)
            is_final = response.result.is_final
    assert all(results[-1].is_sequence_final for results in parts)
    return [
        Sequence(
            [token for result in results for token in result.output_token_ids[0]],
            results[-1].log_probs[0],
            b"".join(np.asarray(result.generation_logits).tobytes() for result in results),
            results[-1].finish_reasons[0],
        )
        for results in parts
    ]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("sequences")
    model, engine = build_random_engine(SPEC, directory, tokens_per_block=16)
    adapters = [save_adapter(model, directory / f"adapter-{seed}", seed, **lora) for seed, lora in enumerate(ADAPTERS)]
    return Service(engine, adapters)


def check(service: Service, ask: Ask, sequences: list[Sequence]) -> None:
    for i, sequence in enumerate(sequences):
        alone = service.alone(dataclasses.replace(ask, n=1, seed=ask.seed + i, streaming=False, cancel=False))
        if ask.cancel and sequence.reason is adaptrt.FinishReason.CANCELLED:
            assert sequence.tokens == alone.tokens[: len(sequence.tokens)]
            assert sequence.log_probs == alone.log_probs[: len(sequence.tokens)]
            assert alone.logits.startswith(sequence.logits)
        else:
            assert sequence == alone


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    adapter=st.none() | st.integers(0, len(ADAPTERS) - 1),
    n=st.integers(1, 4),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([1, 2, MAX_TOKENS]),
    streaming=st.booleans(),
    cancel=st.sampled_from([False, False, True]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(asks, min_size=1, max_size=8),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    kv_tokens=st.sampled_from([176, 256, 4096]),
    reuse=st.booleans(),
    max_num_tokens=st.sampled_from([3, 16, 33, 1024]),
    max_batch_size=st.integers(4, 8),
    num_threads=st.integers(1, 3),
)
def test_each_sequence_is_what_its_seed_gives_alone(
    service, asked, policy, kv_tokens, reuse, max_num_tokens, max_batch_size, num_threads
) -> None:
    fields = crowd_fields(
        policy, kv_tokens, reuse, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size, num_threads=num_threads
    )
    with service.executor(**fields) as executor:
        ids = []
        for ask in asked:
            ids.append(executor.enqueue_request(service.request(ask)))
            if ask.cancel:
                executor.cancel_request(ids[-1])
        found = [collect(executor, request_id, ask.n) for request_id, ask in zip(ids, asked, strict=True)]
        assert executor.get_num_responses_ready() == 0
    for ask, sequences in zip(asked, found, strict=True):
        check(service, ask, sequences)


# The property above may draw such cases; this test makes sure that they occur.


def test_sequences_that_are_paused_resume_the_same(service: Service) -> None:
    # The prompt takes two blocks of five, and each of its four sequences takes one more.
    with service.executor(
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False, max_tokens=80),
    ) as executor:
        asked = [Ask(2, adapter, 4, 1, MAX_TOKENS, False, False) for adapter in (None, 0)]
        ids = [executor.enqueue_request(service.request(ask)) for ask in asked]
        for ask, request_id in zip(asked, ids, strict=True):
            check(service, ask, collect(executor, request_id, ask.n))
        steps = executor.get_latest_iteration_stats()
    assert max(step.inflight_batching_stats.num_paused_requests for step in steps) > 0
    assert max(step.num_active_requests for step in steps) <= 2


def test_the_prompt_is_computed_once(service: Service) -> None:
    ask = Ask(3, 1, 4, 0, MAX_TOKENS, True, False)
    with service.executor() as executor:
        check(service, ask, collect(executor, executor.enqueue_request(service.request(ask)), ask.n))
        steps = executor.get_latest_iteration_stats()
    assert sum(step.inflight_batching_stats.num_ctx_tokens for step in steps) == len(PROMPTS[3])
