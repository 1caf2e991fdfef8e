"""Blocks that stay in the KV cache: their priorities, retention configs and events."""

from __future__ import annotations

import datetime
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import adaptrt
from adaptrt import kv_cache
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


@pytest.fixture
def watched(engine: Path) -> Iterator[adaptrt.Executor]:
    cache = adaptrt.KvCacheConfig(max_tokens=8 * TOKENS_PER_BLOCK, event_buffer_max_size=1000)
    config = adaptrt.ExecutorConfig(kv_cache_config=cache, num_threads=1)
    with adaptrt.Executor(engine, executor_config=config) as made:
        yield made


def test_events_tell_what_is_cached(watched: adaptrt.Executor) -> None:
    manager = watched.get_kv_cache_event_manager()
    assert manager is not None
    (created,) = manager.get_latest_events()
    assert created.data == kv_cache.KVCacheCreatedData([8, 0])
    assert (created.event_id, created.attention_dp_rank) == (0, None)
    ask(watched, PROMPT)
    (event,) = manager.get_latest_events(timeout_ms=0)
    assert isinstance(event.data, kv_cache.KVCacheStoredData)
    assert event.data.parent_hash is None
    assert len(event.data.blocks) == 3
    assert [token.token_id for block in event.data.blocks for token in block.tokens] == PROMPT[:48]
    block = event.data.blocks[0]
    assert (block.lora_id, block.cache_level, block.priority, block.mm_keys) == (None, 0, 35, [])
    assert pickle.loads(pickle.dumps(event)) == event
    assert eval(repr(event), vars(kv_cache)) == event

    retention = adaptrt.KvCacheRetentionConfig([adaptrt.TokenRangeRetentionConfig(0, 16, 70)])
    ask(watched, PROMPT, kv_cache_retention_config=retention)
    (event,) = manager.get_latest_events(datetime.timedelta(0))
    assert event.data == kv_cache.KVCacheUpdatedData(block.block_hash, None, kv_cache.KVCacheEventDiffInt(35, 70))

    for start in (58, 59, 60):
        ask(watched, [start, *PROMPT])
    removed: list[int] = []
    for event in manager.get_latest_events(0):
        if isinstance(event.data, kv_cache.KVCacheRemovedData):
            removed += event.data.block_hashes
    assert removed
    assert block.block_hash not in removed


def test_waiting_for_events_ends_with_the_executor(watched: adaptrt.Executor) -> None:
    manager = watched.get_kv_cache_event_manager()
    assert manager is not None
    seen: list[int] = []

    def read() -> None:
        while events := manager.get_latest_events():
            seen.extend(event.event_id for event in events)

    reader = threading.Thread(target=read)
    reader.start()
    ask(watched, PROMPT)
    watched.shutdown()
    reader.join(60)
    assert seen == [0, 1]
    with pytest.raises(adaptrt.ExecutorClosedError):
        watched.get_kv_cache_event_manager()


def test_there_are_no_events_without_a_buffer(executor: adaptrt.Executor) -> None:
    assert executor.get_kv_cache_event_manager() is None
    with pytest.raises(TypeError, match=r"KvCacheConfig\.event_buffer_max_size is -1"):
        adaptrt.KvCacheConfig(event_buffer_max_size=-1)
