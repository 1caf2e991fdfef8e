"""What an engine is built with: BuildConfig and its parts, with TensorRT-LLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from .._core import MOST_ROTARY_FACTOR, DType, dtype_name, lora_modules
from .checkpoint.config import RELATIVE_POSITIONS, ROPE, ROPE_INTERLEAVED, CheckpointConfig
from .checkpoint.rotary import DynamicScaling
from .compile.tensorrt.capability import CURRENT, parse_capability
from .json_fields import JsonFields
from .network.adapter_sites import is_target
from .network.ops import Activation

AUTO: Final = "auto"
ENABLE: Final = "enable"
DISABLE: Final = "disable"
PAGED: Final = "paged"
NATIVE: Final = "native"
TENSORRT: Final = "tensorrt"
SPARSE_MLP: Final = (AUTO, ENABLE, DISABLE)
BACKENDS: Final = (NATIVE, TENSORRT)
"""What compiles: for this CPU, or for NVIDIA GPUs."""
CONSTANTS: Final = "constants"
EXTERNAL: Final = "external"
WEIGHTS: Final = (CONSTANTS, EXTERNAL)
"""Where a TensorRT engine has its weights: in each plan, or as inputs in a file beside them."""

# The modules of a decoder layer of Llama's that are not fused from others.
DEFAULT_TARGET_MODULES: Final = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
)

# Sizes are 32-bit in the engine.
_LARGEST_SIZE: Final = (1 << 31) - 1
_MOST_BYTES: Final = 1 << 62
_MOST_EXTRA_TOKENS: Final = 1 << 16


@dataclass(frozen=True)
class SoleValue:
    """An option that has one value here."""

    value: Any
    reason: str  # why the others are refused


SOLE_VALUES: Final[dict[str, SoleValue]] = {
    "remove_input_padding": SoleValue(ENABLE, "tokens are always packed"),
    "context_fmha": SoleValue(ENABLE, "attention never makes the matrix of scores"),
    "paged_kv_cache": SoleValue(ENABLE, "the KV cache is always paged"),
    "kv_cache_type": SoleValue(PAGED, "the KV cache is always paged"),
    "logits_dtype": SoleValue("float32", "logits are computed in float32"),
    "lora_ckpt_source": SoleValue("hf", "adapters are read in PEFT's format; convert others to it"),
}
"""Options of TensorRT-LLM whose other values make no sense here or are not supported."""


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """Types of the plugins: a dtype's name, `auto` for the checkpoint's, or `disable`."""

    gpt_attention_plugin: str = AUTO
    gemm_plugin: str = AUTO
    lora_plugin: str = DISABLE
    dora_plugin: str = DISABLE
    remove_input_padding: str = ENABLE
    context_fmha: str = ENABLE
    paged_kv_cache: str = ENABLE


@dataclass(frozen=True, kw_only=True)
class LoraBuildConfig:
    """Which adapters an engine takes."""

    lora_dir: tuple[Path, ...] = ()
    """PEFT adapters that the engine directory carries along; in config.json, paths within it."""
    adapter_names: tuple[str, ...] = ()
    """Under which each of lora_dir is served; () before the build: the directories' own names."""
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: tuple[str, ...] = ()
    """Modules that adapters may change. (): those of the adapters in lora_dir, or without any all of the model's."""
    max_extra_tokens: int = 0
    """How many tokens beyond the model's vocabulary an adapter may bring."""
    long_lora_scaling_factors: tuple[int, ...] = ()
    """By which adapters may divide rotary positions, as those of vLLM's LongLoRA did; ascending."""
    fully_sharded_loras: bool = False
    """With tensor parallelism: ranks share both matrices of adapters, not only the one that is cut with the layer."""

    def target_module_ids(self) -> list[int]:
        """Ids of lora_target_modules, in ascending order."""
        ids = {info.name: info.id for info in lora_modules()}
        return sorted(ids[name] for name in self.lora_target_modules)


@dataclass(frozen=True, kw_only=True)
class TensorRtBuildConfig:
    """What only the backend tensorrt knows."""

    compute_capability: tuple[str, ...] = (CURRENT,)
    """For which GPUs plans are built, one for each: for example 8.6, or `current` for that of this machine."""
    weights: str = CONSTANTS


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Sizes and options of an engine."""

    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_input_len: int | None = None
    """None: max_seq_len; of an encoder, whose inputs are computed whole, max_num_tokens if that is less."""
    max_seq_len: int | None = None
    """Prompt and answer together. None: the model's max_position_embeddings."""
    max_beam_width: int = 1
    """The largest beam_width of a request; each beam is one of max_batch_size."""
    max_encoder_input_len: int | None = None
    """Of a model with an encoder, whose inputs are computed whole, each in one step. None: max_num_tokens, or the
    model's max_position_embeddings if that is less."""
    tokens_per_block: int = 32
    kv_cache_type: str = PAGED
    logits_dtype: str = "float32"
    backend: str = NATIVE
    compress_weights: bool = False
    """Stores the bfloat16 weights of linear layers in twelve bits each, without changing them."""
    weight_memory: int | None = None
    """Bytes that weights may take in memory where an executor is not told otherwise; those that do not fit are read
    from the engine file when they are used. None: all are mapped. Of a TensorRT engine: on the GPU; the others are
    copied there when they are used, and without it all are there."""
    sparse_mlp: str = AUTO
    """Whether layers about a ReLU read the weights alone that it does not close: `auto` where that is possible."""
    sparse_predictors: Path | None = None
    """Directory of PowerInfer's predictors, which close gates before they are computed: results change with it. In
    config.json the directory's name, since the engine has its tensors."""
    lora_config: LoraBuildConfig = field(default_factory=LoraBuildConfig)
    plugin_config: PluginConfig = field(default_factory=PluginConfig)
    tensorrt_config: TensorRtBuildConfig | None = None
    """None: another backend, or the defaults."""

    @property
    def lora_enabled(self) -> bool:
        """Whether the engine takes adapters."""
        return self.plugin_config.lora_plugin != DISABLE

    @property
    def dora_enabled(self) -> bool:
        """Whether adapters may have DoRA magnitudes."""
        return self.plugin_config.dora_plugin == ENABLE

    @property
    def gives_weights_back(self) -> bool:
        """Whether the engine can be read as the base of its adapters: TensorRT's plans keep constants to themselves."""
        tensorrt = self.tensorrt_config
        return self.backend != TENSORRT or (tensorrt is not None and tensorrt.weights == EXTERNAL)

    def with_defaults(self, checkpoint: CheckpointConfig) -> BuildConfig:
        """Without the values that mean "as in the checkpoint"; `auto` becomes its dtype."""
        max_seq_len = self.max_seq_len if self.max_seq_len is not None else self.max_positions(checkpoint)
        dtype = dtype_name(checkpoint.dtype)
        plugins = {
            name: dtype
            for name in ("gpt_attention_plugin", "gemm_plugin", "lora_plugin")
            if getattr(self.plugin_config, name) == AUTO
        }
        tensorrt = self.tensorrt_config
        if tensorrt is None and self.backend == TENSORRT:
            tensorrt = TensorRtBuildConfig()
        return replace(
            self,
            tensorrt_config=tensorrt,
            max_seq_len=max_seq_len,
            max_input_len=self.max_input_len
            if self.max_input_len is not None
            else min(max_seq_len, self.max_num_tokens)
            if checkpoint.is_encoder_only
            else max_seq_len,
            max_encoder_input_len=self._encoder_input_len(checkpoint),
            plugin_config=replace(self.plugin_config, **plugins),
        )

    def _encoder_input_len(self, checkpoint: CheckpointConfig) -> int | None:
        if self.max_encoder_input_len is not None or checkpoint.num_encoder_layers == 0:
            return self.max_encoder_input_len
        return min(self.max_num_tokens, checkpoint.max_position_embeddings)

    def max_positions(self, checkpoint: CheckpointConfig) -> int:
        """How many the model was made for, under the adapter that divides them most."""
        return checkpoint.max_position_embeddings * max(self.lora_config.long_lora_scaling_factors, default=1)

    def problems(self, checkpoint: CheckpointConfig) -> list[str]:
        """Everything that cannot be, of a config after with_defaults()."""
        found = _sole_value_problems(self)
        found += _size_problems(self, checkpoint)
        found += _encoder_problems(self, checkpoint)
        found += _encoder_only_problems(self) if checkpoint.is_encoder_only else []
        found += _plugin_problems(self.plugin_config, checkpoint.dtype)
        found += _lora_problems(self)
        found += _extra_token_problems(self, checkpoint)
        found += _rotary_factor_problems(self, checkpoint)
        found += _sharded_lora_problems(self, checkpoint)
        found += _backend_problems(self, checkpoint)
        found += _compression_problems(self, checkpoint)
        found += _weight_memory_problems(self, checkpoint)
        found += _sparse_mlp_problems(self, checkpoint)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The `build_config` of an engine's config.json."""
        result = _plain(self)
        result["plugin_config"] = _plain(self.plugin_config)
        result["lora_config"] = {
            **_plain(self.lora_config),
            "lora_dir": [path.as_posix() for path in self.lora_config.lora_dir],
        }
        # Engines without them stay what they were.
        for name in ("max_extra_tokens", "long_lora_scaling_factors", "fully_sharded_loras"):
            if not result["lora_config"][name]:
                del result["lora_config"][name]
        if self.weight_memory is None:
            del result["weight_memory"]
        if self.sparse_mlp == AUTO:
            del result["sparse_mlp"]
        if self.sparse_predictors is None:
            del result["sparse_predictors"]
        else:
            result["sparse_predictors"] = self.sparse_predictors.as_posix()
        if self.tensorrt_config is None:
            del result["tensorrt_config"]
        else:
            result["tensorrt_config"] = _plain(self.tensorrt_config)
        return result

    @classmethod
    def from_fields(cls, source: JsonFields) -> BuildConfig:
        """The inverse of to_dict. What is wrong is noted in `source`."""
        plugins, lora = source.object("plugin_config"), source.object("lora_config")
        tensorrt = source.object("tensorrt_config", optional=True)
        values: dict[str, Any] = {name: source.integer(name) for name in _SIZES}
        values["max_encoder_input_len"] = source.optional_integer("max_encoder_input_len")
        values |= {name: source.string(name) for name in ("kv_cache_type", "logits_dtype", "backend")}
        predictors = source.optional_string("sparse_predictors")
        return cls(
            **values,
            compress_weights=source.boolean("compress_weights"),
            weight_memory=source.optional_integer("weight_memory", maximum=_MOST_BYTES),
            sparse_mlp=source.string("sparse_mlp", choices=SPARSE_MLP, default=AUTO),
            sparse_predictors=None if predictors is None else Path(predictors),
            plugin_config=PluginConfig(
                **{item.name: plugins.string(item.name) for item in fields(PluginConfig)} if plugins else {}
            ),
            lora_config=_lora_from_fields(lora) if lora else LoraBuildConfig(),
            tensorrt_config=_tensorrt_from_fields(tensorrt) if tensorrt else None,
        )


_SIZES: Final = (
    "max_batch_size",
    "max_num_tokens",
    "max_input_len",
    "max_seq_len",
    "max_beam_width",
    "tokens_per_block",
)


def _plain(config: Any) -> dict[str, Any]:
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _lora_from_fields(source: JsonFields) -> LoraBuildConfig:
    return LoraBuildConfig(
        lora_dir=tuple(Path(text) for text in source.strings("lora_dir")),
        adapter_names=source.strings("adapter_names"),
        lora_ckpt_source=source.string("lora_ckpt_source"),
        max_lora_rank=source.integer("max_lora_rank"),
        lora_target_modules=source.strings("lora_target_modules"),
        max_extra_tokens=source.integer("max_extra_tokens", minimum=0, default=0),
        long_lora_scaling_factors=source.integers("long_lora_scaling_factors"),
        fully_sharded_loras=source.boolean("fully_sharded_loras", default=False),
    )


def _tensorrt_from_fields(source: JsonFields) -> TensorRtBuildConfig:
    return TensorRtBuildConfig(
        compute_capability=source.strings("compute_capability"), weights=source.string("weights", choices=WEIGHTS)
    )


def _sole_value_problems(config: BuildConfig) -> list[str]:
    values: Mapping[str, Any] = {**_plain(config), **_plain(config.plugin_config), **_plain(config.lora_config)}
    return [
        f"{name} {values[name]} is not supported: {sole.reason}; accepted: {sole.value}"
        for name, sole in SOLE_VALUES.items()
        if values[name] != sole.value
    ]


def _size_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    sizes = {name: getattr(config, name) for name in _SIZES} | {"max_lora_rank": config.lora_config.max_lora_rank}
    found = [
        f"{name} is {size}; it must be 1 to {_LARGEST_SIZE}"
        for name, size in sizes.items()
        if not 1 <= size <= _LARGEST_SIZE
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
    limit = config.max_positions(checkpoint)
    has_limit = checkpoint.position_embedding_type != RELATIVE_POSITIONS
    if sizes["max_seq_len"] > limit and has_limit and not isinstance(checkpoint.rotary_scaling, DynamicScaling):
        found.append(
            f"max_seq_len {sizes['max_seq_len']} is above the model's max_position_embeddings {limit}: "
            "it was not made for such positions"
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
            f"max_encoder_input_len {length} must be 1 to max_num_tokens {config.max_num_tokens}: an encoder input is "
            "computed whole, in one step"
        )
    limit = checkpoint.max_position_embeddings
    if length > limit and checkpoint.position_embedding_type != RELATIVE_POSITIONS:
        found.append(f"max_encoder_input_len {length} is above the model's max_position_embeddings {limit}")
    if config.backend != NATIVE:
        found.append(f"{checkpoint.architecture} has an encoder and cross attention, which need backend {NATIVE}")
    return found


def _encoder_only_problems(config: BuildConfig) -> list[str]:
    found = []
    assert config.max_input_len is not None
    if config.max_input_len > config.max_num_tokens:
        found.append(
            f"max_input_len {config.max_input_len} is above max_num_tokens {config.max_num_tokens}: an encoder "
            "computes its inputs whole, each in one step"
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
            reason = f"the checkpoint is {name}, and an engine has the type of its checkpoint; convert it with --dtype"
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
            found.append(f"lora_target_modules names {name}, which networks do not have")
        elif known[name].is_of_vocabulary and config.backend != NATIVE:
            found.append(f"lora_target_modules names {name}, which the backend {config.backend} does not adapt")
    if len(set(lora.lora_target_modules)) != len(lora.lora_target_modules):
        found.append(f"lora_target_modules names a module twice: {', '.join(lora.lora_target_modules)}")
    if config.lora_enabled:
        return found
    for name, is_set in (
        ("lora_dir", bool(lora.lora_dir)),
        ("lora_target_modules", bool(lora.lora_target_modules)),
        ("dora_plugin enable", config.dora_enabled),
        ("max_extra_tokens", lora.max_extra_tokens != 0),
        ("long_lora_scaling_factors", bool(lora.long_lora_scaling_factors)),
        ("fully_sharded_loras", lora.fully_sharded_loras),
    ):
        if is_set:
            found.append(f"{name} needs lora_plugin {AUTO}: without it the engine takes no adapters")
    return found


def _extra_token_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    count = config.lora_config.max_extra_tokens
    if not 0 <= count <= _MOST_EXTRA_TOKENS:
        return [f"max_extra_tokens is {count}; it must be 0 to {_MOST_EXTRA_TOKENS}"]
    if count == 0:
        return []
    found = []
    if checkpoint.is_encoder_only or checkpoint.num_encoder_layers or not checkpoint.has_lm_head:
        found.append(f"max_extra_tokens is for decoders with an lm_head, which {checkpoint.architecture} is not")
    if checkpoint.mapping.world_size > 1:
        found.append(
            "max_extra_tokens cannot be served by several ranks; convert the checkpoint without --tp_size and --pp_size"
        )
    if config.backend != NATIVE:
        found.append(f"max_extra_tokens needs backend {NATIVE}")
    return found


def _rotary_factor_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    factors = config.lora_config.long_lora_scaling_factors
    if not factors:
        return []
    found = []
    if list(factors) != sorted(set(factors)) or not all(2 <= factor <= MOST_ROTARY_FACTOR for factor in factors):
        found.append(
            f"long_lora_scaling_factors are {' '.join(map(str, factors))}; they must be ascending, and each of them 2 "
            f"to {MOST_ROTARY_FACTOR}"
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
    if config.backend != TENSORRT:
        return [] if tensorrt is None else [f"compute_capability and weights need backend {TENSORRT}"]
    assert tensorrt is not None
    found = []
    if checkpoint.dtype == DType.FLOAT32:
        found.append(
            f"a {dtype_name(checkpoint.dtype)} checkpoint cannot be built with backend {TENSORRT}, whose kernels "
            "multiply 16-bit numbers; convert the checkpoint with --dtype float16 or bfloat16"
        )
    if checkpoint.quantization is not None:
        found.append(
            f"a checkpoint of {checkpoint.quantization.quant_algo.name} weights cannot be built with backend "
            f"{TENSORRT} yet; convert it without --use_weight_only"
        )
    if checkpoint.int8_kv_cache:
        found.append(f"an int8 KV cache needs backend {NATIVE}; leave out --int8_kv_cache, here and in the conversion")
    if tensorrt.weights not in WEIGHTS:
        found.append(f"weights is {tensorrt.weights}; accepted: {', '.join(WEIGHTS)}")
    return found + _capability_problems(tensorrt.compute_capability)


def _weight_memory_problems(config: BuildConfig, checkpoint: CheckpointConfig) -> list[str]:
    if config.weight_memory is None:
        return []
    found = []
    if config.weight_memory < 1:
        found.append(f"weight_memory is {config.weight_memory}; it must be at least 1")
    if config.weight_memory > _MOST_BYTES:
        found.append(f"weight_memory is {config.weight_memory}; it must be at most {_MOST_BYTES}")
    if config.tensorrt_config is not None and config.tensorrt_config.weights == EXTERNAL:
        found.append(
            f"weight_memory needs weights {CONSTANTS}: TensorRT streams the constants of a plan, and not its inputs"
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
            f"compress_weights cannot act on the checkpoint's {checkpoint.quantization.quant_algo.name} weights"
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
        if config.backend != NATIVE:
            found.append(f"{name} needs backend {NATIVE}")
        if config.compress_weights:
            found.append(
                f"{name} and compress_weights: single outputs of compressed weights cannot be read; choose one"
            )
        if checkpoint.quantization is not None:
            found.append(f"{name} cannot act on the checkpoint's {checkpoint.quantization.quant_algo.name} weights")
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
        f"compute_capability {name} is none; expected {CURRENT} or a number such as 8.6"
        for name in names
        if name != CURRENT and parse_capability(name) is None
    ]
    if not names or len(set(names)) != len(names) or (CURRENT in names and len(names) > 1):
        found.append(f"compute_capability is '{' '.join(names)}'; expected {CURRENT} alone, or each capability once")
    return found
