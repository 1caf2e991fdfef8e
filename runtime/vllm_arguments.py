"""vLLM's arguments that set up an engine, for LLM() and `adaptrt serve`.

Arguments with an equivalent are aliases (VLLM_LIMITS). Those in the table are accepted with the values that ask for
what happens anyway; other values are refused with what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .._core import ConfigError, DType, dtype_from_name, dtype_name
from ..builder.model_cache.options import VLLM_LIMITS, EngineOptions
from ..common.shown_value import shown
from ..formats.engine.build_config import DTYPE_ALIASES
from .sampling_fields import MAX_LOG_PROBS
from .vllm_other_arguments import GROUPS


class Accepted(NamedTuple):
    """Values that an argument accepts, and why it accepts no others."""

    values: tuple[Any, ...] | range
    """(): none."""
    reason: str
    """The reason, or what to use instead."""
    in_python: str = ""
    """The same for LLM(); empty: as `reason`."""
    in_help: bool = True
    """True: the help of `adaptrt serve` lists the flag, if it accepts anything."""


_ANY: Final = (True, False)
_TWO_RANKS: Final = "convert the checkpoint with --{} N, build it, and give the engine"
_NAME_OF_HUB: Final = "write the revision into the model's name: ORGANISATION/NAME@REVISION"
_OWN_FILES: Final = "change config.json in a copy of the model's directory"

ENGINE_ARGUMENTS: Final[Mapping[str, Accepted]] = {
    "enable_lora": Accepted(_ANY, "requests may always name adapters"),
    "max_loras": Accepted(range(1, 1 << 31), "a batch may have any number of adapters"),
    "max_cpu_loras": Accepted(
        (),
        "use --host-cache-bytes N, the memory for adapters",
        "give executor_config with PeftCacheConfig(host_cache_size=BYTES)",
    ),
    "lora_dtype": Accepted(("auto",), "adapters are converted to the types of the engine's kernels"),
    "lora_extra_vocab_size": Accepted(
        (), "use --max-extra-tokens N", "give engine_options=EngineOptions(max_extra_tokens=N)"
    ),
    "fully_sharded_loras": Accepted(_ANY, "it does not change results"),
    "gpu_memory_utilization": Accepted(
        (),
        "use --kv-cache-tokens N, --host-cache-bytes N and --weight-memory SIZE; without them, caches take what memory "
        "allows",
        "give executor_config with KvCacheConfig(free_gpu_memory_fraction=F), a part of the memory that is free after "
        "loading",
    ),
    "kv_cache_memory_bytes": Accepted(
        (), "use --kv-cache-tokens N", "give executor_config with KvCacheConfig(max_tokens=N)"
    ),
    "kv_cache_dtype": Accepted(
        ("auto",), "use --int8-kv-cache for 8 bits", "give engine_options=EngineOptions(int8_kv_cache=True) for 8 bits"
    ),
    "block_size": Accepted((), "use --tokens_per_block N of adaptrt build"),
    "num_gpu_blocks_override": Accepted(
        (), "use --kv-cache-tokens N", "give executor_config with KvCacheConfig(max_tokens=N)"
    ),
    "swap_space": Accepted(
        (0,),
        "use --kv-cache-dir DIR and --kv-cache-dir-bytes N",
        "give executor_config with KvCacheConfig(host_cache_size=BYTES, host_cache_dir=DIR)",
    ),
    "cpu_offload_gb": Accepted((0,), "use --weight-memory SIZE", "give weight_memory"),
    "tensor_parallel_size": Accepted((1,), _TWO_RANKS.format("tp_size")),
    "pipeline_parallel_size": Accepted((1,), _TWO_RANKS.format("pp_size")),
    "enable_expert_parallel": Accepted((False,), _TWO_RANKS.format("moe_ep_size")),
    "data_parallel_size": Accepted((1,), "use the replicas of adaptrt.serve.ray"),
    "distributed_executor_backend": Accepted(("mp", "uni"), "only replicas run on Ray (adaptrt.serve.ray)"),
    "disable_custom_all_reduce": Accepted(_ANY, "it does not change results"),
    "enable_prefix_caching": Accepted(
        (True,),
        "the KV cache always reuses prefixes",
        "give executor_config with KvCacheConfig(enable_block_reuse=False)",
    ),
    "enable_chunked_prefill": Accepted(
        (True,), "prompts that are longer than a step are divided; raise max_num_batched_tokens"
    ),
    "scheduling_policy": Accepted(("fcfs", "priority"), "requests of equal priority start in the order of arrival"),
    "async_scheduling": Accepted(_ANY, "it does not change results"),
    "enforce_eager": Accepted(_ANY, "it does not change results"),
    "compilation_config": Accepted((), "engines are compiled by adaptrt build; leave it out"),
    "trust_remote_code": Accepted(_ANY, "code of models is never run"),
    "max_logprobs": Accepted((MAX_LOG_PROBS,), "this is the executor's limit"),
    "load_format": Accepted(("auto", "safetensors"), "the kind of files follows from their names"),
    "config_format": Accepted(("auto", "hf"), "models have Hugging Face's config.json"),
    "tokenizer_mode": Accepted(("auto", "hf"), "tokenizers are read from tokenizer.json"),
    "skip_tokenizer_init": Accepted((False,), "texts need the tokenizer"),
    "revision": Accepted((), _NAME_OF_HUB),
    "tokenizer_revision": Accepted((), _NAME_OF_HUB),
    "code_revision": Accepted((), "code of models is never run"),
    "download_dir": Accepted((), "set HF_HOME"),
    "hf_token": Accepted((), "set HF_TOKEN"),
    "device": Accepted(("auto", "cpu"), "TensorRT engines run on a GPU"),
    "runner": Accepted(("auto", "generate"), "a model's files say what it can do"),
    "task": Accepted(("auto", "generate"), "a model's files say what it can do"),
    "convert": Accepted(("auto", "none"), "a model's files say what it can do"),
    "model_impl": Accepted(("auto",), "every family has one implementation"),
    "rope_scaling": Accepted((), _OWN_FILES),
    "rope_theta": Accepted((), _OWN_FILES),
    "hf_overrides": Accepted((), _OWN_FILES),
    "override_generation_config": Accepted((), "give the fields in requests", "give them in SamplingParams"),
    "limit_mm_per_prompt": Accepted((), "a prompt has at most 32 images; adaptrt serve takes max_images"),
    "guided_decoding_backend": Accepted(("auto", "guidance"), "llguidance compiles all guides"),
    "structured_outputs_config": Accepted((), "llguidance compiles all guides; leave it out"),
    "logits_processors": Accepted((), "a Request of the executor takes logits_post_processor"),
    "kv_transfer_config": Accepted((), "prompts are computed where answers are generated"),
    "enable_sleep_mode": Accepted((False,), "shut the process down instead"),
    "disable_log_stats": Accepted(_ANY, "statistics are not logged"),
    "reasoning_parser": Accepted(("",), "reasoning is part of the answer's text", in_help=False),
    **{
        name: Accepted(values, reason, in_help=False)
        for reason, group in GROUPS.items()
        for name, values in group.items()
    },
}
"""Arguments that LLM() and `adaptrt serve` share."""

_PYTHON_ARGUMENTS: Final[Mapping[str, Accepted]] = {
    "quantization": Accepted(
        (),
        "a quantised model says so in its config.json; engine_options=EngineOptions(quantization=...) quantises others",
    ),
    "chat_template": Accepted((), "put the template into the model's directory as chat_template.jinja"),
    "served_model_name": Accepted((), "answers of LLM name no model; it is a flag of adaptrt serve"),
}
"""Arguments of LLM() that are other flags of `adaptrt serve`."""
_OPTIONS: Final = ("max_lora_rank", "long_lora_scaling_factors")
"""Arguments that EngineOptions has under the same name."""


def listed(values: tuple[Any, ...] | range) -> str:
    """Formats accepted values for an error or a help text."""
    if isinstance(values, range):
        return f"{values.start} to {values.stop - 1}"
    return " or ".join(str(value) if str(value) else "''" for value in values)


def with_vllm_arguments(options: EngineOptions | None, arguments: Mapping[str, Any]) -> EngineOptions | None:
    """Returns the options with those of vLLM's arguments added. An argument that is None counts as absent.

    Raises ConfigError with all arguments that cannot be used, and for one that `options` has too; TypeError for a name
    that is unknown.
    """
    given: dict[str, Any] = {}
    problems = []
    for name, value in arguments.items():
        if name in VLLM_LIMITS.values() or name in (*_OPTIONS, "dtype"):
            ours = {alias: limit for limit, alias in VLLM_LIMITS.items()}.get(name, name)
            if value is None or (name == "dtype" and value == "auto"):
                continue
            if options is not None and getattr(options, ours) is not None:
                problems.append(f"{name} is {shown(value)}, and engine_options has {ours}; expected one of them")
            given[ours] = _dtype(value, problems) if name == "dtype" else value
            continue
        accepted = _PYTHON_ARGUMENTS.get(name) or ENGINE_ARGUMENTS.get(name)
        if accepted is None:
            raise TypeError(f"LLM() got an unexpected argument '{name}'")
        if value is not None and not is_among(value, accepted.values):
            expected = f"{listed(accepted.values)}: " if accepted.values else "no value: "
            problems.append(f"{name} is {shown(value)}; expected {expected}{accepted.in_python or accepted.reason}")
    if problems:
        raise ConfigError("; ".join(problems))
    return replace(EngineOptions() if options is None else options, **given) if given else options


def is_among(value: Any, values: tuple[Any, ...] | range) -> bool:
    """True for one of the values; True and 1 differ."""
    if isinstance(values, range):  # finds only integers quickly
        return isinstance(value, int) and not isinstance(value, bool) and value in values
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)


def _dtype(value: Any, problems: list[str]) -> DType | None:
    if isinstance(value, DType):
        return value
    # torch's types are written "torch.bfloat16".
    name = str(value).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name in [dtype_name(dtype) for dtype in DType]:
        return dtype_from_name(name)
    names = ", ".join([*(dtype_name(dtype) for dtype in DType), *DTYPE_ALIASES])
    problems.append(f"dtype is {shown(value)}; expected auto, {names}")
    return None
