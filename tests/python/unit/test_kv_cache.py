"""What stays in the KV cache."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import adaptrt
from support.models import ModelSpec
from support.serving import build_random_engine

TOKENS_PER_BLOCK = 16
PROMPT = list(range(2, 60))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kv-cache")
    return build_random_engine(ModelSpec(), directory, "float32", tokens_per_block=TOKENS_PER_BLOCK)[1]


@pytest.fixture
def executor(engine: Path) -> Iterator[adaptrt.Executor]:
    cache = adaptrt.KvCacheConfig(max_tokens=8 * TOKENS_PER_BLOCK)
    config = adaptrt.ExecutorConfig(kv_cache_config=cache, num_threads=1)
    with adaptrt.Executor(engine, executor_config=config) as made:
        yield made


def ask(executor: adaptrt.Executor, prompt: list[int], **fields: object) -> list[int]:
    request_id = executor.enqueue_request(adaptrt.Request(prompt, 2, **fields))  # type: ignore[arg-type]
    return executor.await_responses(request_id)[-1].result.output_token_ids[0]


def reused_blocks(executor: adaptrt.Executor) -> int:
    stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert stats is not None
    return stats.reused_blocks


@pytest.mark.parametrize(("priority", "reused"), [(90, 3), (0, 0)])
def test_blocks_are_kept_by_priority(executor: adaptrt.Executor, priority: int, reused: int) -> None:
    ranges = [adaptrt.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, priority)]
    first = ask(executor, PROMPT, kv_cache_retention_config=adaptrt.KvCacheRetentionConfig(ranges))
    for start in (58, 59, 60):
        ask(executor, [start, *PROMPT])
    before = reused_blocks(executor)
    assert ask(executor, PROMPT) == first
    assert reused_blocks(executor) - before == reused


def test_a_retention_is_compared_copied_and_changed() -> None:
    config = adaptrt.KvCacheRetentionConfig(
        [adaptrt.TokenRangeRetentionConfig(0, 64, 90, datetime.timedelta(seconds=2))], 5, 1500
    )
    assert adaptrt.KvCacheRetentionConfig.TokenRangeRetentionConfig is adaptrt.TokenRangeRetentionConfig
    assert config.token_range_retention_configs[0].duration_ms == datetime.timedelta(seconds=2)
    assert config.decode_duration_ms == datetime.timedelta(seconds=1.5)
    assert pickle.loads(pickle.dumps(config)) == config
    request = adaptrt.Request([1], 1, kv_cache_retention_config=config)
    assert request.kv_cache_retention_config == config
    config.decode_retention_priority = 101
    assert config.validate() == ["decode_retention_priority is 101; accepted: 0 to 100"]
    assert adaptrt.KvCacheRetentionConfig().decode_retention_priority == 35
