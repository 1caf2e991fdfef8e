"""A request's beams are, bit for bit, the same as alone: in any batch, chunking, policy and cache."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine, crowd_fields

SPEC = ModelSpec(vocab_size=101)
ADAPTERS = [{"r": 4}, {"r": 7, "use_dora": True}]
PROMPTS = [[5], [9, 8, 7], list(range(2, 34)), [*range(2, 18), 3, 3]]
LONGEST = 14


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request to an executor."""

    prompt: int
    adapter: int | None
    beam_width: int
    max_tokens: int
    length_penalty: float
    early_stopping: int
    diversity_rate: float
    repetition_penalty: float
    end_id: int | None
    streaming: bool
    cancel: bool


class Service:
    """An engine and its adapters; the result of each request alone is computed once."""

    def __init__(self, engine: Path, adapters: list[Path]) -> None:
        self.engine = adaptrt.load_engine(engine)
        self.lora = [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(adapters)]
        self.alone = cache(self._alone)

    def executor(self, **fields: Any) -> adaptrt.Executor:
        config = adaptrt.ExecutorConfig(max_beam_width=4, **fields)
        return adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config)

    def request(self, ask: Ask) -> adaptrt.Request:
        return adaptrt.Request(
            PROMPTS[ask.prompt],
            ask.max_tokens,
            streaming=ask.streaming,
            sampling_config=adaptrt.SamplingConfig(
                ask.beam_width,
                length_penalty=ask.length_penalty,
                early_stopping=ask.early_stopping,
                beam_search_diversity_rate=ask.diversity_rate,
                repetition_penalty=ask.repetition_penalty,
            ),
            output_config=adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True, top_log_probs=2),
            end_id=ask.end_id,
            lora_config=None if ask.adapter is None else self.lora[ask.adapter],
            return_all_generated_tokens=True,
        )

    def _alone(self, ask: Ask) -> list[Any]:
        with self.executor(num_threads=1) as executor:
            return beams(last(executor, executor.enqueue_request(self.request(ask))))


def last(executor: adaptrt.Executor, request_id: int) -> adaptrt.Result:
    """Returns the last result of a request."""
    while True:
        for response in executor.await_responses(request_id, 60.0):
            assert not response.has_error(), response.error_msg
            if response.result.is_final:
                return response.result


def beams(result: adaptrt.Result) -> list[Any]:
    """Returns every field of the beams, in the result's order."""
    return [
        result.output_token_ids,
        result.cum_log_probs,
        result.log_probs,
        result.top_log_probs,
        result.finish_reasons,
    ]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("beams")
    model, engine = build_random_engine(SPEC, directory, tokens_per_block=8, max_beam_width=4)
    adapters = [save_adapter(model, directory / f"adapter-{seed}", seed, **lora) for seed, lora in enumerate(ADAPTERS)]
    return Service(engine, adapters)


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    adapter=st.none() | st.integers(0, len(ADAPTERS) - 1),
    beam_width=st.integers(1, 4),
    max_tokens=st.sampled_from([1, 2, LONGEST]),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    early_stopping=st.integers(0, 2),
    diversity_rate=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    end_id=st.none() | st.integers(0, SPEC.vocab_size - 1),
    streaming=st.booleans(),
    cancel=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(asks, min_size=1, max_size=8),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    kv_tokens=st.sampled_from([128, 176, 4096]),
    reuse=st.booleans(),
    max_num_tokens=st.sampled_from([1, 3, 16, 33, 1024]),
    max_batch_size=st.integers(4, 8),
    num_threads=st.integers(1, 3),
)
def test_a_crowd_changes_no_beam(
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
        results = [last(executor, request_id) for request_id in ids]
        assert executor.get_num_responses_ready() == 0
    for ask, result in zip(asked, results, strict=True):
        if adaptrt.FinishReason.CANCELLED not in result.finish_reasons:
            assert beams(result) == service.alone(dataclasses.replace(ask, streaming=False, cancel=False))


# The property above may draw such cases; this test makes sure that they occur.


def test_others_are_paused_and_beams_are_not(service: Service) -> None:
    search = Ask(2, 1, 4, LONGEST, 1.0, 0, 0.0, 1.0, None, False, False)
    single = Ask(2, 0, 1, LONGEST, 0.0, 1, 0.0, 1.0, None, False, False)
    # The search can grow to 4 blocks for its prompt and 2 for each beam, and the others to 6 each.
    with service.executor(
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False, max_tokens=8 * 26),
        peft_cache_config=adaptrt.PeftCacheConfig(num_ensure_workers=0),  # all requests start at once on any machine
    ) as executor:
        asked = [search, single, single, single]
        ids = executor.enqueue_requests([service.request(ask) for ask in asked])
        for ask, request_id in zip(asked, ids, strict=True):
            assert beams(last(executor, request_id)) == service.alone(ask)
        steps = executor.get_latest_iteration_stats()
    assert max(step.inflight_batching_stats.num_paused_requests for step in steps) > 0
    assert max(step.inflight_batching_stats.num_gen_requests for step in steps) > 1
