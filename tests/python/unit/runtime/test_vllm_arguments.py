"""vLLM's arguments of LLM(): engine options, and refused arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import adaptrt
from adaptrt import ConfigError, DType, EngineOptions, ExecutorConfig
from adaptrt.builder.model_cache.options import VLLM_LIMITS
from adaptrt.runtime import first_use
from adaptrt.runtime import llm as llm_module
from adaptrt.runtime.vllm_arguments import with_vllm_arguments
from support.models import ModelSpec, save_adapter, save_model
from support.tokenizers import byte_level, save_tokenizer
from support.vllm_names import names_of


def test_limits_and_types_are_options_of_the_engine() -> None:
    options = with_vllm_arguments(
        EngineOptions(max_extra_tokens=3),
        {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_lora_rank": 8, "dtype": "half"},
    )
    assert options == EngineOptions(
        max_extra_tokens=3, max_seq_len=64, max_batch_size=4, max_num_tokens=32, max_lora_rank=8, dtype=DType.FLOAT16
    )
    for dtype in ("bfloat16", torch.bfloat16, DType.BFLOAT16):
        assert with_vllm_arguments(None, {"dtype": dtype}) == EngineOptions(dtype=DType.BFLOAT16)


def test_arguments_that_change_nothing_give_no_options() -> None:
    taken = {
        "enable_lora": True, "max_loras": 4, "tensor_parallel_size": 1, "enforce_eager": True,
        "trust_remote_code": False, "enable_prefix_caching": True, "kv_cache_dtype": "auto",
        "max_model_len": None, "dtype": "auto", "quantization": None, "gpu_memory_utilization": None, "swap_space": 0,
        "disable_log_stats": False,
    }  # fmt: skip
    assert with_vllm_arguments(None, taken) is None
    given = EngineOptions(max_seq_len=3)
    assert with_vllm_arguments(given, taken) == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_loras": 0}, r"max_loras is 0; expected 1 to 2147483647: a batch may have any number of adapters"),
        ({"max_loras": True}, r"max_loras is True; expected 1 to"),
        ({"max_loras": 0.5}, r"max_loras is 0.5; expected 1 to"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; expected 1: convert the checkpoint with --tp_size N"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"enable_prefix_caching": False}, r"expected True: give executor_config with KvCacheConfig\(enable_block"),
        ({"enforce_eager": 1}, "enforce_eager is 1; expected True or False"),
        ({"quantization": "awq"}, "quantization is 'awq'; expected no value: a quantised model says so"),
        ({"gpu_memory_utilization": 0.9}, r"KvCacheConfig\(free_gpu_memory_fraction=F\)"),
        ({"dtype": "int3"}, "dtype is 'int3'; expected auto, float32, float16, bfloat16, half, float"),
        ({"kv_cache_dtype": ["fp8"]}, r"kv_cache_dtype is \['fp8'\]; expected auto: "),
        ({"swap_space": 1, "max_loras": 0}, "swap_space is 1; .*max_loras is 0|max_loras is 0.*swap_space is 1"),
    ],
)
def test_other_values_are_refused_with_what_to_use(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_vllm_arguments(None, arguments)


def test_an_option_is_given_once() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 8, and engine_options has max_seq_len; expected one"):
        with_vllm_arguments(EngineOptions(max_seq_len=9), {"max_model_len": 8})


def test_llm_takes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned: list[EngineOptions | None] = []

    def plan(source: object, options: EngineOptions | None) -> object:
        planned.append(options)
        raise ConfigError("planned")

    monkeypatch.setattr(first_use, "plan_engine", plan)
    with pytest.raises(ConfigError, match="planned"):
        adaptrt.LLM(tmp_path, max_model_len=8, enable_lora=True)
    assert planned == [EngineOptions(max_seq_len=8)]
    with pytest.raises(TypeError, match=r"LLM\(\) got an unexpected argument 'max_modle_len'"):
        adaptrt.LLM(tmp_path, max_modle_len=8)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_damaged_tokenizer_is_noticed_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = saved_model(tmp_path / "model")
    damaged = model / "tokenizer.json"
    if elsewhere:
        (tmp_path / "other").mkdir()
        damaged = tmp_path / "other" / "tokenizer.json"
    damaged.write_text("{")
    monkeypatch.setattr(llm_module, "make_engines", None)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        adaptrt.LLM(model, max_model_len=64, tokenizer=damaged if elsewhere else None)


def test_a_prompt_that_is_longer_than_a_step_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = saved_model(tmp_path / "model")
    prompt = [3 + number % 40 for number in range(60)]
    with adaptrt.LLM(model, max_model_len=96) as llm:
        expected = llm.generate(prompt, max_tokens=6)
    with adaptrt.LLM(model, max_model_len=96, max_num_batched_tokens=16) as llm:
        assert llm.generate(prompt, max_tokens=6) == expected
        engine = llm.executor.engine.directory
    with adaptrt.LLM(engine, ExecutorConfig()) as llm, pytest.raises(adaptrt.RequestError, match="max_num_tokens = 16"):
        llm.generate(prompt, max_tokens=6)  # the caller's config stays unchanged


def test_a_default_length_fits_after_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = saved_model(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=4)
    virtual = save_virtual_tokens(model, tmp_path / "virtual", 5)
    with adaptrt.LLM(model, max_model_len=48) as llm:
        params = adaptrt.SamplingParams(temperature=0, ignore_eos=True)
        for lora, num_virtual in ((None, 0), (adapter, 0), (virtual, 5)):
            for room in (1, 3):
                made = llm.generate([3] * (48 - room - num_virtual), params, lora=lora)
                assert len(made.token_ids) == room
        with pytest.raises(adaptrt.RequestError, match="45 tokens and max_tokens 4 make 49 tokens"):
            llm.generate([3] * 45, max_tokens=4)
        with pytest.raises(adaptrt.RequestError, match="48 tokens and max_tokens 1 make 49 tokens"):
            llm.generate([3] * 48)


def save_virtual_tokens(model: Path, directory: Path, number: int) -> Path:
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=number)
    peft.get_peft_model(base, config).save_pretrained(directory)
    return directory


def saved_model(directory: Path) -> Path:
    model = save_model(ModelSpec(vocab_size=272, max_position_embeddings=128), directory)
    save_tokenizer(byte_level(), model)
    return model


def test_every_argument_of_vllm_is_taken_or_refused_by_name() -> None:
    taken = {*inspect.signature(adaptrt.LLM.__init__).parameters, *VLLM_LIMITS.values(), "max_lora_rank"}
    for name in set(names_of("LLM")) - taken:
        with pytest.raises(ConfigError, match=rf"^{name} is <object .*; expected "):
            with_vllm_arguments(None, {name: object()})


def test_defaults_of_vllm_are_accepted() -> None:
    taken = {
        "runner": "auto", "convert": "auto", "skip_tokenizer_init": False, "allowed_local_media_path": "",
        "allowed_media_domains": None, "chat_template": None, "offload_group_size": 0, "offload_num_in_group": 1,
        "offload_prefetch_step": 1, "offload_params": set(), "enable_return_routed_experts": False,
        "return_sampling_mask": False, "hf_token": None, "pooler_config": None, "attention_config": None,
        "spec_method": None, "cpu_offload_gb": 0, "moe_backend": "auto", "watermark": 0.0,
        "logprobs_mode": "raw_logprobs",
        "model_loader_extra_config": {}, "ignore_patterns": ["original/**/*"], "reasoning_parser": "", "nnodes": 1,
    }  # fmt: skip
    assert with_vllm_arguments(None, taken) is None


def test_a_dictionary_of_drafts_is_refused(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"speculative_config is {'method': 'ngram'}; expected LookaheadDecodingCon"):
        adaptrt.LLM(model, speculative_config={"method": "ngram"})  # type: ignore[arg-type]
