"""A second level of the KV cache changes no bit: with preemption, after a restart, after an adapter's weights change
under its task id, or after its file is damaged or truncated."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ATTENTION_MODULES, ModelSpec, save_adapter
from support.serving import Answer, build_random_engine, collect, make_request

TOKENS_PER_BLOCK = 16
LONG = list(range(2, 120))
PROMPTS = [LONG[:40], LONG[:70], LONG, [*LONG[:50], 3, 3, 3], list(range(120, 200)), [9, 8, 7]]
WEIGHTS = [{"r": 4, "target_modules": ATTENTION_MODULES}, {"r": 16}, {"r": 7, "use_dora": True}]
TASK = 5
MAX_TOKENS = 20
FILE = "kv_cache.adaptrt"


@dataclasses.dataclass
class Service:
    """An engine, and adapters that share a task id."""

    engine: Path
    adapters: list[adaptrt.LoraConfig]

    def __post_init__(self) -> None:
        self.alone = cache(self._alone)

    def lora(self, weights: int | None) -> adaptrt.LoraConfig | None:
        return None if weights is None else self.adapters[weights]

    def _alone(self, prompt: int, weights: int | None) -> Answer:
        config = adaptrt.ExecutorConfig(num_threads=1)
        with adaptrt.Executor(self.engine, executor_config=config) as executor:
            request = make_request(PROMPTS[prompt], MAX_TOKENS, self.lora(weights))
            return collect(executor, executor.enqueue_request(request))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def service(request, tmp_path_factory) -> Service:
    spec = ModelSpec(hidden_size=72, head_dim=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=257)
    directory = tmp_path_factory.mktemp(request.param)
    model, engine = build_random_engine(spec, directory, request.param, tokens_per_block=TOKENS_PER_BLOCK)
    adapters = []
    for seed, lora in enumerate(WEIGHTS):
        saved = save_adapter(model, directory / f"{seed}", seed, **lora)
        adapters.append(adaptrt.LoraConfig.from_peft(TASK, saved, engine, replace=True))
    return Service(engine, adapters)


asked = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.none() | st.integers(0, len(WEIGHTS) - 1),
    st.sampled_from([None, None, 1, 2]),  # cache salt
    st.booleans(),  # with logits of the prompt
)
lives = st.lists(
    st.tuples(
        st.lists(asked, min_size=1, max_size=8),
        st.sampled_from([9, 10, 14]),  # blocks of the pool
        st.integers(1, 3),  # threads
        st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]),
        st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3),  # damage after the executor ends
        st.sampled_from([1.0, 1.0, 0.6]),  # share of the file that is left
    ),
    min_size=2,
    max_size=4,
)


def damage(path: Path, changes: list[tuple[float, int]], left: float) -> None:
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[min(int(place * len(content)), len(content) - 1)] = value
    # The first bytes are kept, because they identify the file.
    path.write_bytes(bytes(path.read_bytes()[:8] + content[8 : max(8, int(left * len(content)))]))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=lives, num_file_blocks=st.sampled_from([3, 20, 200]))
def test_a_second_level_changes_no_bit(service: Service, lives, num_file_blocks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for crowd, num_blocks, num_threads, policy, changes, left in lives:
            config = adaptrt.ExecutorConfig(
                num_threads=num_threads,
                enable_chunked_context=True,
                scheduler_config=adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy)),
                kv_cache_config=adaptrt.KvCacheConfig(
                    max_tokens=num_blocks * TOKENS_PER_BLOCK,
                    host_cache_size=4096 + num_file_blocks * 40960,
                    host_cache_dir=directory,
                ),
            )
            with adaptrt.Executor(service.engine, executor_config=config) as executor:
                ids = []
                for prompt, weights, salt, with_logits in crowd:
                    request = make_request(PROMPTS[prompt], MAX_TOKENS, service.lora(weights), with_logits)
                    request.cache_salt_id = salt
                    ids.append(executor.enqueue_request(request))
                answers = [collect(executor, request_id) for request_id in ids]
                stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
                assert stats is not None
                assert stats.second_level is not None
                assert stats.second_level.error == ""
            for (prompt, weights, _, with_logits), answer in zip(crowd, answers, strict=True):
                alone = service.alone(prompt, weights)
                assert answer.same_bits(alone) if with_logits else answer.same_log_probs(alone)
            damage(Path(directory) / FILE, changes, left)
