"""The file level of the KV cache."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

TOKENS_PER_BLOCK = 16
PROMPT = list(range(2, 60))
FILE = "kv_cache.adaptrt"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("second-level")
    return build_random_engine(ModelSpec(), directory, "float32", tokens_per_block=TOKENS_PER_BLOCK)[1]


def start(engine: Path, directory: Path, host_cache_size: int = 1 << 20, **fields: object) -> adaptrt.Executor:
    cache = adaptrt.KvCacheConfig(
        max_tokens=8 * TOKENS_PER_BLOCK, host_cache_size=host_cache_size, host_cache_dir=str(directory)
    )
    config = adaptrt.ExecutorConfig(kv_cache_config=cache, num_threads=1, **fields)  # type: ignore[arg-type]
    return adaptrt.Executor(engine, executor_config=config)


def ask(executor: adaptrt.Executor, prompt: list[int], lora: adaptrt.LoraConfig | None = None) -> list[int]:
    request_id = executor.enqueue_request(adaptrt.Request(prompt, 2, lora_config=lora))
    return executor.await_responses(request_id)[-1].result.output_token_ids[0]


def stats_of(executor: adaptrt.Executor) -> adaptrt.SecondLevelStats:
    stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert stats is not None
    assert stats.second_level is not None
    return stats.second_level


def test_blocks_outlive_the_executor(engine: Path, tmp_path: Path) -> None:
    with start(engine, tmp_path) as executor:
        first = ask(executor, PROMPT)
        assert stats_of(executor).read_blocks == 0
    with start(engine, tmp_path) as executor:
        assert ask(executor, PROMPT) == first
        stats = stats_of(executor)
        assert (stats.read_blocks, stats.failed_blocks, stats.error) == (3, 0, "")
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_memory_counts_the_blocks_that_wait_for_the_file(engine: Path, tmp_path: Path) -> None:
    def memory_of(executor: adaptrt.Executor) -> int:
        with executor:
            ask(executor, PROMPT)
            return executor.get_latest_iteration_stats()[-1].cpu_mem_usage

    # Give both executors LoRA caches of one size; by default the size depends on free memory.
    adapters = adaptrt.PeftCacheConfig(num_device_module_layer=4096)
    config = adaptrt.ExecutorConfig(
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=8 * TOKENS_PER_BLOCK),
        peft_cache_config=adapters,
        num_threads=1,
    )
    without = adaptrt.Executor(engine, executor_config=config)
    block_bytes = without.engine_info.kv_block_bytes
    beyond = memory_of(start(engine, tmp_path, peft_cache_config=adapters)) - memory_of(without)
    # At most eight blocks wait to be written, as many as the pool has, and four are read at a time, each in whole
    # pages.
    assert 12 * block_bytes <= beyond <= 12 * (block_bytes + 2 * 4096)


ASK = f"""
import sys
import adaptrt
cache = adaptrt.KvCacheConfig(max_tokens=128, host_cache_size=1 << 20, host_cache_dir=sys.argv[2])
config = adaptrt.ExecutorConfig(kv_cache_config=cache, num_threads=1)
with adaptrt.Executor(sys.argv[1], executor_config=config) as executor:
    answer = executor.await_responses(executor.enqueue_request(adaptrt.Request({PROMPT}, 2)))[-1].result
    print(answer.output_token_ids[0], executor.get_latest_iteration_stats()[-1].kv_cache_stats.second_level.read_blocks)
"""


def test_blocks_outlive_the_process(engine: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, engine, tmp_path]
    first, second = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2))
    assert first.split()[-1] == "0"
    assert second.split()[-1] == "3"
    assert first.split()[:-1] == second.split()[:-1]


def test_adapters_find_their_own_blocks(engine: Path, tmp_path: Path) -> None:
    model = engine.parent / "model"
    directories = [save_adapter(model, tmp_path / f"{seed}", seed, r=4) for seed in range(2)]
    cache = tmp_path / "cache"
    cache.mkdir()
    answers = []
    for weights, read in ((0, 0), (1, 0), (0, 3), (1, 3)):
        with start(engine, cache) as executor:
            answers.append(ask(executor, PROMPT, adaptrt.LoraConfig.from_peft(3, directories[weights], engine)))
            assert stats_of(executor).read_blocks == read
    assert answers[:2] == answers[2:]


def test_virtual_tokens_find_their_own_blocks(engine: Path, tmp_path: Path) -> None:
    tables = np.random.default_rng(1).normal(size=(2, 20, 36)).astype(np.float32)
    prompt = [*range(61, 81), *PROMPT]
    answers = []
    for table, read in ((0, 0), (1, 0), (0, 4), (1, 4)):
        with start(engine, tmp_path) as executor:
            tuning = adaptrt.PromptTuningConfig(tables[table])
            request = adaptrt.Request(prompt, 2, prompt_tuning_config=tuning)
            answers.append(executor.await_responses(executor.enqueue_request(request))[-1].result.output_token_ids[0])
            assert stats_of(executor).read_blocks == read
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_cache_size": 1 << 20}, "host_cache_size is 1048576 and host_cache_dir is None"),
        ({"host_cache_dir": "/tmp"}, "host_cache_dir is '/tmp' and host_cache_size is None or 0"),
        ({"host_cache_size": 1 << 20, "host_cache_dir": "/none/such"}, "host_cache_dir /none/such: cannot be opened"),
        ({"onboard_blocks": False}, "onboard_blocks is False"),
        ({"secondary_offload_min_priority": 3}, "secondary_offload_min_priority is 3"),
        ({"cross_kv_cache_fraction": 0.5}, "cross_kv_cache_fraction is 0.5"),
        ({"sink_token_length": 1}, "sink_token_length is 1"),
        ({"max_attention_window": [128]}, "max_attention_window has 128"),
    ],
)
def test_invalid_options_are_refused_by_name(engine: Path, fields: dict[str, object], message: str) -> None:
    config = adaptrt.ExecutorConfig(kv_cache_config=adaptrt.KvCacheConfig(**fields))  # type: ignore[arg-type]
    with pytest.raises(adaptrt.ConfigError, match=re.escape(message)):
        adaptrt.Executor(engine, executor_config=config)


def test_a_size_without_room_for_a_block_is_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(adaptrt.ConfigError, match="host_cache_size is 4096; one KV block takes"):
        start(engine, tmp_path, 4096)


def test_a_directory_serves_one_executor(engine: Path, tmp_path: Path) -> None:
    with start(engine, tmp_path) as executor:
        with pytest.raises(adaptrt.ConfigError, match="is used by another executor"):
            start(engine, tmp_path)
        ask(executor, PROMPT)
    start(engine, tmp_path).shutdown()


def test_a_directory_that_is_removed_costs_nothing_else(engine: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    with start(engine, directory) as executor:
        first = ask(executor, PROMPT)
        (directory / FILE).unlink()
        directory.rmdir()
        for begin in (58, 59, 60):
            ask(executor, [begin, *PROMPT])
        assert ask(executor, PROMPT) == first


def test_a_full_disk_costs_blocks_alone(engine: Path, tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with start(engine, tmp_path) as executor:
        first = ask(executor, PROMPT)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 4096, before[1]))
        try:
            for begin in (58, 59, 60):
                ask(executor, [begin, *PROMPT])
            assert ask(executor, PROMPT) == first
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert stats_of(executor).error == ""


def test_windows_of_the_model_are_taken(tmp_path: Path) -> None:
    spec = ModelSpec(family="mistral", extra=(("sliding_window", 48),))
    engine = build_random_engine(spec, tmp_path, "float32")[1]
    for windows in ([48], [48, 704], [100_000]):
        cache = adaptrt.KvCacheConfig(max_attention_window=windows, max_tokens=256)
        adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(kv_cache_config=cache)).shutdown()
    cache = adaptrt.KvCacheConfig(max_attention_window=[32])
    with pytest.raises(adaptrt.ConfigError, match="max_attention_window has 32; accepted: None, the windows that"):
        adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(kv_cache_config=cache))


def test_statistics_as_json(engine: Path, tmp_path: Path) -> None:
    with start(engine, tmp_path) as executor:
        ask(executor, PROMPT)
        text = executor.get_latest_iteration_stats()[-1].to_json_str()
    assert '"secondLevel":{"maxNumBlocks":' in text
