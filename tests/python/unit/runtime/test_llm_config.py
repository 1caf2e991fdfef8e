"""An ExecutorConfig with LLM's own arguments."""

from __future__ import annotations

import pytest

import adaptrt
from adaptrt.runtime.llm_config import (
    with_device_ids,
    with_kernels,
    with_lora_storage,
    with_speculation,
    with_weight_memory,
)


def test_a_draft_models_config_is_set_and_the_callers_config_stays() -> None:
    config = adaptrt.ExecutorConfig(max_batch_size=3)
    given = adaptrt.DraftTargetDecodingConfig(speculative_model_dir="draft_model", max_draft_len=2)
    changed = with_speculation(config, given)
    assert changed is not None
    draft = changed.draft_target_decoding_config
    assert draft is not None
    assert (draft.speculative_model_dir, draft.max_draft_len) == ("draft_model", 2)
    assert changed.max_batch_size == 3
    assert config.draft_target_decoding_config is None


def test_lookahead_becomes_a_decoding_config() -> None:
    lookahead = adaptrt.LookaheadDecodingConfig(4, 3, 4)
    changed = with_speculation(None, lookahead)
    assert changed is not None
    assert changed.decoding_config is not None
    assert changed.decoding_config.lookahead_decoding_config == lookahead
    with pytest.raises(adaptrt.ConfigError, match="executor_config has a decoding_config"):
        with_speculation(changed, lookahead)


def test_two_drafts_are_refused() -> None:
    draft = adaptrt.DraftTargetDecodingConfig()
    changed = with_speculation(None, draft)
    with pytest.raises(adaptrt.ConfigError, match="executor_config has a draft_target_decoding_config"):
        with_speculation(changed, draft)


def test_nothing_asked_changes_nothing() -> None:
    config = adaptrt.ExecutorConfig()
    assert with_speculation(config, None) is config
    assert with_kernels(config, "") is config
    assert with_weight_memory(config, None) is config
    assert with_lora_storage(config, "") is config


def test_lora_storage_is_set_or_refused() -> None:
    given = adaptrt.PeftCacheConfig(host_cache_size=1 << 20)
    config = adaptrt.ExecutorConfig(peft_cache_config=given)
    changed = with_lora_storage(config, "compressed")
    assert changed is not None
    assert changed.peft_cache_config is not None
    assert changed.peft_cache_config.host_cache_size == 1 << 20
    assert changed.peft_cache_config.lora_storage == "compressed"
    assert config.peft_cache_config == given
    assert with_lora_storage(adaptrt.ExecutorConfig(peft_cache_config=None), "exact") == adaptrt.ExecutorConfig()
    with pytest.raises(adaptrt.ConfigError, match="lora_storage is 'exact', and executor_config has 'compressed'"):
        with_lora_storage(changed, "exact")


def test_the_gpu_is_set_or_refused() -> None:
    config = adaptrt.ExecutorConfig()
    assert with_device_ids(config, None) is config
    changed = with_device_ids(config, [2])
    assert changed is not None
    assert changed.parallel_config.device_ids == [2]
    assert config.parallel_config is None
    assert with_device_ids(changed, (2,)).parallel_config.device_ids == [2]
    with pytest.raises(adaptrt.ConfigError, match=r"device_ids is \[1\], and executor_config has \[2\]"):
        with_device_ids(changed, [1])


def test_kernels_and_weight_memory_are_set_or_refused() -> None:
    config = adaptrt.ExecutorConfig()
    changed = with_weight_memory(with_kernels(config, "portable"), "2KiB")
    assert changed is not None
    assert (changed.kernels, changed.weight_memory) == ("portable", 2048)
    assert (config.kernels, config.weight_memory) == ("", None)
    with pytest.raises(adaptrt.ConfigError, match="kernels is 'avx2', and executor_config has 'portable'"):
        with_kernels(changed, "avx2")
    with pytest.raises(adaptrt.ConfigError, match="weight_memory is 4096, and executor_config has 2048"):
        with_weight_memory(changed, 4096)
