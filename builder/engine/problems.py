"""Checks a BuildConfig against its checkpoint."""

from __future__ import annotations

from ..._core import DType, dtype_name, lora_modules
from ...formats.checkpoint.activation import Activation
from ...formats.checkpoint.config import RELATIVE_POSITIONS, ROPE, ROPE_INTERLEAVED, CheckpointConfig
from ...formats.checkpoint.rotary import DynamicScaling
from ...formats.engine.build_config import (
    AUTO,
    BACKENDS,
    CONSTANTS,
    CUDA,
    DISABLE,
    ENABLE,
    EXTERNAL,
    LIMITS,
    LORA_LIMITS,
    MOST_WEIGHT_MEMORY,
    NATIVE,
    SOLE_VALUES,
    SPARSE_MLP,
    TENSORRT,
    WEIGHTS,
    BuildConfig,
    PluginConfig,
)
from ...formats.engine.tensorrt.capability import CURRENT, parse_capability
from ...formats.network.adapter_sites import is_target
from .adapter_fit import can_adapt


def problems_of(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    """Lists every inconsistency in a build config after with_defaults()."""
    found = _sole_value_problems(config)
    found += _size_problems(config, checkpoint)
    found += _encoder_problems(config, checkpoint)
    found += _state_problems(config, checkpoint)
    found += _latent_problems(config, checkpoint)
    found += _native_only_problems(config, checkpoint)
    found += _encoder_only_problems(config) if checkpoint.is_encoder_only else []
    found += _plugin_problems(config.plugin_config, checkpoint.dtype)
    found += _lora_problems(config)
    found += _extra_token_problems(config, checkpoint)
    found += _rotary_factor_problems(config, checkpoint)
    found += _sharded_lora_problems(config, checkpoint)
    found += _backend_problems(config, checkpoint)
    found += _compression_problems(config, checkpoint)
    found += _weight_memory_problems(config, checkpoint)
    found += _sparse_mlp_problems(config, checkpoint)
    return found


def _sole_value_problems(config: BuildConfig) -> list[str]:
    values = {**vars(config), **vars(config.plugin_config), **vars(config.lora_config)}
    return [
        f"{name} {values[name]} is not supported: {sole.reason}; accepted: {sole.value}"
        for name, sole in SOLE_VALUES.items()
        if values[name] != sole.value
    ]


def _size_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    sizes = {name: getattr(config, name) for name, limit in LIMITS.items() if limit.maximum is not None}
    sizes |= {name: getattr(config.lora_config, name) for name, limit in LORA_LIMITS.items() if not limit.is_list}
    limits = {**LIMITS, **LORA_LIMITS}
    found = [
        f"{name} is {size}; it must be {limits[name].minimum} to {limits[name].maximum}"
        for name, size in sizes.items()
        if not limits[name].accepts(size)
    ]
    if sizes["max_input_len"] > sizes["max_seq_len"]:
        found.append(
            f"max_input_len {sizes['max_input_len']} is above max_seq_len {sizes['max_seq_len']}, "
            "which counts prompt and answer"
        )
    if sizes["max_beam_width"] > sizes["max_batch_size"]:
        found.append(
            f"max_beam_width {sizes['max_beam_width']} is above max_batch_size {sizes['max_batch_size']}, "
            "which counts each beam"
        )
    positions = config.max_positions(checkpoint)
    has_limit = checkpoint.position_embedding_type != RELATIVE_POSITIONS
    if sizes["max_seq_len"] > positions and has_limit and not isinstance(checkpoint.rotary_scaling, DynamicScaling):
        found.append(
            f"max_seq_len {sizes['max_seq_len']} is above the model's max_position_embeddings {positions}: "
            "the model was not trained for such positions"
        )
    return found


def _encoder_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    length = config.max_encoder_input_len
    if checkpoint.num_encoder_layers == 0:
        if length is None:
            return []
        return [f"max_encoder_input_len is {length}, but {checkpoint.architecture} has no encoder"]
    assert length is not None
    found = []
    if not 1 <= length <= config.max_num_tokens:
        found.append(
            f"max_encoder_input_len {length} must be 1 to max_num_tokens {config.max_num_tokens}: an encoder "
            "input is computed in one step"
        )
    limit = checkpoint.max_position_embeddings
    if length > limit and checkpoint.position_embedding_type != RELATIVE_POSITIONS:
        found.append(f"max_encoder_input_len {length} is above the model's max_position_embeddings {limit}")
    if config.backend == TENSORRT:  # cuda_support.py lists what backend cuda lacks.
        found.append(f"{checkpoint.architecture} has an encoder and cross attention, which need backend {NATIVE}")
    return found


def _state_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if not checkpoint.has_states or config.backend != TENSORRT:  # cuda_support.py lists what backend cuda lacks.
        return []
    return [f"{checkpoint.architecture} keeps states, which need backend {NATIVE}"]


def _latent_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if checkpoint.layer_of_heads is None or config.backend != TENSORRT:  # cuda_support.py lists what cuda lacks.
        return []
    return [f"{checkpoint.architecture} has latent attention, which needs backend {NATIVE}"]


def _native_only_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if checkpoint.native_only is None or config.backend != TENSORRT:  # cuda_support.py lists what cuda lacks.
        return []
    return [f"{checkpoint.architecture} has {checkpoint.native_only}, which need backend {NATIVE}"]


def _encoder_only_problems(config: BuildConfig) -> list[str]:
    found = []
    assert config.max_input_len is not None
    if config.max_input_len > config.max_num_tokens:
        found.append(
            f"max_input_len {config.max_input_len} is above max_num_tokens {config.max_num_tokens}: an encoder "
            "computes each input in one step"
        )
    if config.max_beam_width != 1:
        found.append(f"max_beam_width is {config.max_beam_width}; accepted: 1, an encoder generates nothing")
    return found


def _plugin_problems(plugins: PluginConfig, dtype: DType) -> list[str]:
    name = dtype_name(dtype)
    found = []
    for plugin in ("gpt_attention_plugin", "gemm_plugin", "lora_plugin"):
        value = getattr(plugins, plugin)
        can_disable = plugin == "lora_plugin"
        if value == name or (can_disable and value == DISABLE):
            continue
        accepted = f"{AUTO}, {name}{', ' + DISABLE if can_disable else ''}"
        if value == DISABLE:
            reason = "every engine has it"
        elif value in {dtype_name(known) for known in DType}:
            reason = f"the checkpoint is {name}, and an engine has its checkpoint's type; convert it with --dtype"
        else:
            reason = "it is not a type of weights"
        found.append(f"{plugin} {value} cannot be used: {reason}; accepted: {accepted}")
    if plugins.dora_plugin not in (ENABLE, DISABLE):
        found.append(f"dora_plugin is {plugins.dora_plugin}; accepted: {ENABLE}, {DISABLE}")
    return found


def _lora_problems(config: BuildConfig) -> list[str]:
    found = []
    lora = config.lora_config
    known = {info.name: info for info in lora_modules() if is_target(info)}
    accepted = [name for name, info in known.items() if info.is_served]
    for name in lora.lora_target_modules:
        if name not in known:
            found.append(f"lora_target_modules names '{name}'; accepted: {', '.join(accepted)}")
        elif not known[name].is_served:
            found.append(f"lora_target_modules names {name}, which no supported network has")
        elif not can_adapt(config.backend, name):
            found.append(
                f"lora_target_modules names {name}, which adapters cannot change with backend {config.backend}"
            )
    if len(set(lora.lora_target_modules)) != len(lora.lora_target_modules):
        found.append(f"lora_target_modules names a module twice: {', '.join(lora.lora_target_modules)}")
    if config.lora_enabled:
        return found
    for name, is_set in (
        ("lora_dir", bool(lora.lora_dir)),
        ("lora_target_modules", bool(lora.lora_target_modules)),
        ("dora_plugin enable", config.dora_enabled),
        *((name, getattr(lora, name) != limit.default) for name, limit in LORA_LIMITS.items() if limit.is_omitted),
        ("fully_sharded_loras", lora.fully_sharded_loras),
    ):
        if is_set:
            found.append(f"{name} needs lora_plugin {AUTO}: without it the engine accepts no adapters")
    return found


def _extra_token_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if config.lora_config.max_extra_tokens <= 0:
        return []
    found = []
    if checkpoint.is_encoder_only or checkpoint.num_encoder_layers or not checkpoint.has_lm_head:
        found.append(f"max_extra_tokens is for decoders with an lm_head, which {checkpoint.architecture} is not")
    if checkpoint.num_token_tables > 1:
        found.append(
            f"max_extra_tokens is given, but {checkpoint.architecture} has embeddings of each layer, in which new "
            "tokens have no rows"
        )
    if checkpoint.mapping.world_size > 1:
        found.append(
            "max_extra_tokens needs a checkpoint of one rank; convert the checkpoint without --tp_size and --pp_size"
        )
    if config.backend == TENSORRT:
        found.append(f"max_extra_tokens needs backend {NATIVE} or {CUDA}")
    return found


def _rotary_factor_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    factors = config.lora_config.long_lora_scaling_factors
    if not factors:
        return []
    found = []
    limit = LORA_LIMITS["long_lora_scaling_factors"]
    if list(factors) != sorted(set(factors)) or not all(map(limit.accepts, factors)):
        found.append(
            f"long_lora_scaling_factors are {' '.join(map(str, factors))}; they must be ascending, and each of them "
            f"{limit.minimum} to {limit.maximum}"
        )
    if checkpoint.is_encoder_only or checkpoint.num_encoder_layers:
        found.append(f"long_lora_scaling_factors are for decoders, which {checkpoint.architecture} is not")
    elif checkpoint.position_embedding_type not in (ROPE, ROPE_INTERLEAVED):
        found.append(
            f"long_lora_scaling_factors divide rotary positions, which {checkpoint.architecture} does not have"
        )
    if checkpoint.rotary_scaling is not None:
        found.append(
            f"long_lora_scaling_factors are for models whose rotary positions are not scaled, and the checkpoint's "
            f'rotary_scaling is "{checkpoint.rotary_scaling.rope_type}"'
        )
    if config.backend != NATIVE:
        found.append(f"long_lora_scaling_factors need backend {NATIVE}")
    return found


def _sharded_lora_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if not config.lora_config.fully_sharded_loras:
        return []
    if checkpoint.mapping.tp_size == 1:
        return ["fully_sharded_loras needs a checkpoint that was converted with a --tp_size above 1"]
    return []


def _backend_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if config.backend not in BACKENDS:
        return [f"backend is {config.backend}; accepted: {', '.join(BACKENDS)}"]
    tensorrt = config.tensorrt_config
    found = []
    if config.backend != TENSORRT and tensorrt is not None:
        found.append(f"compute_capability and weights need backend {TENSORRT}")
    if config.backend == NATIVE:
        return found
    if checkpoint.dtype == DType.FLOAT32:
        found.append(
            f"a {dtype_name(checkpoint.dtype)} checkpoint cannot be built with backend {config.backend}, whose kernels "
            "multiply 16-bit numbers; convert the checkpoint with --dtype float16 or bfloat16"
        )
    if checkpoint.quantization is not None and config.backend == TENSORRT:
        found.append(
            f"a checkpoint of {checkpoint.quantization.quant_algo.name} weights cannot be built with backend "
            f"{config.backend} yet; convert it without --use_weight_only"
        )
    if checkpoint.int8_kv_cache and config.backend == TENSORRT:
        found.append(
            f"an int8 KV cache needs backend {NATIVE} or {CUDA}; leave out --int8_kv_cache, here and in the conversion"
        )
    if config.backend != TENSORRT:
        return found
    assert tensorrt is not None
    if tensorrt.weights not in WEIGHTS:
        found.append(f"weights is {tensorrt.weights}; accepted: {', '.join(WEIGHTS)}")
    return found + _capability_problems(tensorrt.compute_capability)


def _weight_memory_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if config.weight_memory is None:
        return []
    found = []
    if config.weight_memory < 1:
        found.append(f"weight_memory is {config.weight_memory}; it must be at least 1")
    if config.weight_memory > MOST_WEIGHT_MEMORY:
        found.append(f"weight_memory is {config.weight_memory}; it must be at most {MOST_WEIGHT_MEMORY}")
    if config.tensorrt_config is not None and config.tensorrt_config.weights == EXTERNAL:
        found.append(
            f"weight_memory needs weights {CONSTANTS}: TensorRT streams the constants of a plan, but not its inputs"
        )
    if checkpoint.mapping.world_size > 1:
        found.append(f"weight_memory needs an engine of one rank; the checkpoint has {checkpoint.mapping.world_size}")
    return found


def _compression_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if not config.compress_weights:
        return []
    found = []
    if config.backend != NATIVE:
        found.append(f"compress_weights needs backend {NATIVE}")
    if checkpoint.dtype != DType.BFLOAT16:
        found.append(
            f"compress_weights needs bfloat16 weights, whose upper bytes it stores in four bits; the checkpoint's are "
            f"{dtype_name(checkpoint.dtype)}"
        )
    if checkpoint.quantization is not None:
        found.append(
            f"compress_weights does not work with the checkpoint's {checkpoint.quantization.quant_algo.name} weights"
        )
    return found


def _sparse_mlp_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if config.sparse_mlp not in SPARSE_MLP:
        return [f"sparse_mlp is {config.sparse_mlp}; accepted: {', '.join(SPARSE_MLP)}"]
    found = []
    asked = [
        name
        for name, is_asked in (
            ("sparse_mlp", config.sparse_mlp == ENABLE),
            ("sparse_predictors", config.sparse_predictors is not None),
        )
        if is_asked
    ]
    for name in asked:
        if config.backend == TENSORRT or (config.backend == CUDA and name != "sparse_mlp"):
            accepted = f"{NATIVE} or {CUDA}" if name == "sparse_mlp" else NATIVE
            found.append(f"{name} needs backend {accepted}")
        if config.compress_weights:
            found.append(f"{name} and compress_weights: compressed weights cannot be read neuron by neuron; choose one")
        if checkpoint.quantization is not None:
            found.append(
                f"{name} does not work with the checkpoint's {checkpoint.quantization.quant_algo.name} weights"
            )
        if not Activation(checkpoint.hidden_act).leaves_zeros:
            found.append(
                f"{name} needs a model whose MLP has a ReLU; {checkpoint.architecture} has {checkpoint.hidden_act}"
            )
    if config.sparse_predictors is not None:
        if config.sparse_mlp == DISABLE:
            found.append(f"sparse_predictors needs sparse_mlp {AUTO} or {ENABLE}: without it every weight is read")
        if checkpoint.mapping.world_size > 1:
            found.append(
                f"sparse_predictors needs a checkpoint of one rank; this one has {checkpoint.mapping.world_size}"
            )
    return found


def _capability_problems(names: tuple[str, ...]) -> list[str]:
    found = [
        f"compute_capability is {name}; expected {CURRENT} or a number such as 8.6"
        for name in names
        if name != CURRENT and parse_capability(name) is None
    ]
    if not names or len(set(names)) != len(names) or (CURRENT in names and len(names) > 1):
        found.append(f"compute_capability is '{' '.join(names)}'; expected only {CURRENT}, or each capability once")
    return found
