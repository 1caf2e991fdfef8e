"""A request's tokens, logits and log probs are the same bits alone and in any batch, chunking, thread count and cache
size."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ATTENTION_MODULES, ModelSpec, save_adapter
from support.serving import Answer, build_random_engine, collect, make_request

SPEC = ModelSpec(hidden_size=72, head_dim=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=257)
ADAPTERS = [
    {"r": 4, "target_modules": ATTENTION_MODULES},
    {"r": 16, "use_rslora": True},
    {"r": 7, "use_dora": True},
    {"r": 32},
]
LONG = list(range(2, 140))
PROMPTS = [[5], [9, 8, 7, 6], LONG[:40], LONG[:41], LONG, [*LONG[:64], 3, 3, 3]]
MAX_TOKENS = 24
STORAGES = ("exact", "int8")
# A block that a prompt matches only in part is not reused, is copied, or is taken over.
REUSE = [{"enable_partial_reuse": False}, {}, {"copy_on_partial_reuse": False}]


@dataclasses.dataclass
class Service:
    """An engine and its adapters; the answer of each (prompt, adapter) alone is computed once."""

    engine: Path
    adapters: list[Path]

    def executor(self, **fields) -> adaptrt.Executor:
        return adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))

    def lora(self, adapter: int | None) -> adaptrt.LoraConfig | None:
        return None if adapter is None else self._configs[adapter]

    def __post_init__(self) -> None:
        self._configs = [
            adaptrt.LoraConfig.from_peft(task_id, directory, self.engine)
            for task_id, directory in enumerate(self.adapters)
        ]
        # One executor for all requests alone: starting one takes longer than a request.
        self.quiet = {
            storage: self.executor(
                num_threads=1,
                kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False),
                peft_cache_config=adaptrt.PeftCacheConfig(lora_storage=storage),
            )
            for storage in STORAGES
        }
        self.alone = cache(self._alone)

    def _alone(self, prompt: int, adapter: int | None, storage: str = "exact") -> Answer:
        quiet = self.quiet[storage]
        return collect(quiet, quiet.enqueue_request(make_request(PROMPTS[prompt], MAX_TOKENS, self.lora(adapter))))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def service(request, tmp_path_factory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp(request.param)
    model, engine = build_random_engine(SPEC, directory, request.param, tokens_per_block=16)
    adapters = [save_adapter(model, directory / f"adapter-{seed}", seed, **lora) for seed, lora in enumerate(ADAPTERS)]
    made = Service(engine, adapters)
    with contextlib.ExitStack() as executors:
        for quiet in made.quiet.values():
            executors.enter_context(quiet)
        yield made


arrivals = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.none() | st.integers(0, len(ADAPTERS) - 1),
        st.sampled_from([0.0, 0.0, 0.002]),  # seconds before it arrives
        st.booleans(),  # with logits; without, only log probs are returned
    ),
    min_size=1,
    max_size=14,
)
executors = st.fixed_dictionaries(
    {
        "num_threads": st.integers(1, 4),
        "max_num_tokens": st.sampled_from([16, 33, 64, 1024]),
        "max_batch_size": st.integers(1, 8),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=arrivals,
    fields=executors,
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    chunking=st.sampled_from([None, adaptrt.ContextChunkingPolicy.EQUAL_PROGRESS]),
    fairness=st.booleans(),
    kv_tokens=st.sampled_from([176, 256, 4096]),
    reuse=st.sampled_from([{"enable_block_reuse": False}, *REUSE]),
    small_cache=st.booleans(),
    storage=st.sampled_from(STORAGES),
)
def test_a_crowd_changes_no_bit(
    service, arrivals, fields, policy, chunking, fairness, kv_tokens, reuse, small_cache, storage
) -> None:
    peft_cache = adaptrt.PeftCacheConfig(num_device_module_layer=32 * 14 if small_cache else 0, lora_storage=storage)
    with service.executor(
        enable_chunked_context=True,
        scheduler_config=adaptrt.SchedulerConfig(
            getattr(adaptrt.CapacitySchedulerPolicy, policy), chunking, adapter_fairness=fairness
        ),
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=kv_tokens, **reuse),
        peft_cache_config=peft_cache,
        **fields,
    ) as executor:
        ids = []
        for prompt, adapter, delay, with_logits in arrivals:
            time.sleep(delay)
            request = make_request(PROMPTS[prompt], MAX_TOKENS, service.lora(adapter), with_logits)
            ids.append(executor.enqueue_request(request))
        answers = [collect(executor, request_id) for request_id in ids]
    for (prompt, adapter, _, with_logits), answer in zip(arrivals, answers, strict=True):
        alone = service.alone(prompt, adapter, storage)
        assert answer.same_bits(alone) if with_logits else answer.same_log_probs(alone)


def crowd(service, executor) -> None:
    """Runs every prompt with every adapter at once; each answer must equal the one that it gives alone."""
    cases = [(prompt, adapter) for prompt in range(len(PROMPTS)) for adapter in (None, *range(len(ADAPTERS)))]
    ids = [
        executor.enqueue_request(make_request(PROMPTS[prompt], MAX_TOKENS, service.lora(adapter)))
        for prompt, adapter in cases
    ]
    for case, request_id in zip(cases, ids, strict=True):
        assert collect(executor, request_id).same_bits(service.alone(*case))


# The properties above may draw such cases; these tests make sure that each occurs.


def test_evicted_adapters_come_back_the_same(service) -> None:
    with service.executor(peft_cache_config=adaptrt.PeftCacheConfig(num_device_module_layer=32 * 14)) as executor:
        crowd(service, executor)
        assert executor.lora_cache_stats().device_evictions > 0


def test_paused_requests_resume_the_same(service) -> None:
    with service.executor(
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False, max_tokens=176),
    ) as executor:
        crowd(service, executor)
        steps = executor.get_latest_iteration_stats()
        assert max(step.inflight_batching_stats.num_paused_requests for step in steps) > 0


def test_reused_prefixes_give_the_same(service) -> None:
    def request(adapter: int | None) -> adaptrt.Request:
        # A request for the prompt's logits could not reuse its prefix.
        output = adaptrt.OutputConfig(return_generation_logits=True, exclude_input_from_output=True)
        return adaptrt.Request(LONG, MAX_TOKENS, output_config=output, lora_config=service.lora(adapter))

    with service.executor() as executor:
        for adapter in (None, 0, None, 0, 1):
            result = executor.await_responses(executor.enqueue_request(request(adapter)))[-1].result
            alone = service.alone(PROMPTS.index(LONG), adapter)
            assert result.output_token_ids[0] == alone.tokens
            assert result.generation_logits[0].tobytes() == alone.generation_logits.tobytes()
        # Two requests found their own adapter's prefix; the request with another adapter found none.
        blocks = len(LONG) // 16
        assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.reused_blocks == 2 * blocks


@pytest.mark.parametrize("copy", [True, False])
def test_beginnings_of_blocks_give_the_same(service, copy) -> None:
    output = adaptrt.OutputConfig(return_generation_logits=True, exclude_input_from_output=True)
    kv_cache = adaptrt.KvCacheConfig(copy_on_partial_reuse=copy)
    with service.executor(kv_cache_config=kv_cache) as executor:
        for adapter in (None, 0, 2):
            for prompt in range(len(PROMPTS)):
                request = adaptrt.Request(
                    PROMPTS[prompt], MAX_TOKENS, output_config=output, lora_config=service.lora(adapter)
                )
                result = executor.await_responses(executor.enqueue_request(request))[-1].result
                alone = service.alone(prompt, adapter)
                assert result.output_token_ids[0] == alone.tokens
                assert result.generation_logits[0].tobytes() == alone.generation_logits.tobytes()
        stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
        assert stats.partially_reused_blocks >= (6 if copy else 3)
        assert stats.reused_tokens > stats.reused_blocks * stats.tokens_per_block
