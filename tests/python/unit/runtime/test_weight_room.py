"""The memory that weights and caches of a configured size need together."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt import ExecutorConfig, KvCacheConfig, PeftCacheConfig
from adaptrt._core import ConfigError
from adaptrt.runtime.weight_memory import require_room

HOST = PeftCacheConfig(host_cache_size=50)


@pytest.mark.parametrize(
    ("has_adapters", "peft", "max_tokens", "parts"),
    [
        (False, None, None, "activations 7, weights 100"),
        (False, HOST, None, "activations 7, weights 100"),
        (True, None, None, "activations 7, weights 100"),
        (True, PeftCacheConfig(), None, "activations 7, weights 100"),
        (True, HOST, None, "activations 7, adapters on the host level 50, weights 100"),
        (True, HOST, 33, "activations 7, KV cache 2000, adapters on the host level 50, weights 100"),
    ],
)
def test_what_is_needed_must_be_available(
    has_adapters: bool, peft: PeftCacheConfig | None, max_tokens: int | None, parts: str
) -> None:
    program: Any = SimpleNamespace(
        tokens_per_block=16, kv_block_bytes=lambda: 1000, lora=SimpleNamespace(sites=[1] if has_adapters else [])
    )
    storage: Any = SimpleNamespace(program=SimpleNamespace(arena_bytes=7), num_bytes=300)
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(max_tokens=max_tokens), peft_cache_config=peft)
    needed = sum(int(number) for number in re.findall(r"\d+", parts))
    require_room(program, storage, 100, config, needed)
    with pytest.raises(ConfigError) as raised:
        require_room(program, storage, 100, config, needed - 1)
    assert str(raised.value) == (
        f"weight_memory is 100: {needed} bytes are needed ({parts}); {needed - 1} are available"
    )


def test_weights_need_no_more_than_their_file() -> None:
    program: Any = SimpleNamespace(lora=SimpleNamespace(sites=[]))
    storage: Any = SimpleNamespace(program=SimpleNamespace(arena_bytes=7), num_bytes=300)
    require_room(program, storage, 1000, ExecutorConfig(), 307)
    with pytest.raises(ConfigError, match=r"307 bytes are needed \(activations 7, weights 300\); 306 are available"):
        require_room(program, storage, 1000, ExecutorConfig(), 306)
