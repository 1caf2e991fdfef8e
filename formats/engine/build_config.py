"""BuildConfig, the options that an engine is built with, and its parts; names and defaults are TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from ..._core import MOST_ROTARY_FACTOR, dtype_name, lora_modules
from ...common.byte_size import MOST_BYTES
from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.adapter_limits import AdapterLimits
from .limits import Limit, limit, limits_of
from .tensorrt.capability import CURRENT

AUTO: Final = "auto"
DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}
"""vLLM's second names of types."""
ENABLE: Final = "enable"
DISABLE: Final = "disable"
PAGED: Final = "paged"
NATIVE: Final = "native"
TENSORRT: Final = "tensorrt"
CUDA: Final = "cuda"
SPARSE_MLP: Final = (AUTO, ENABLE, DISABLE)
BACKENDS: Final = (NATIVE, CUDA, TENSORRT)
"""Compilers: for CPUs, for NVIDIA GPUs with AdaptRT's kernels, and for NVIDIA GPUs with TensorRT."""
CONSTANTS: Final = "constants"
EXTERNAL: Final = "external"
WEIGHTS: Final = (CONSTANTS, EXTERNAL)
"""Location of a TensorRT engine's weights: in each plan, or as inputs in one file next to the plans."""

# Modules of a Llama decoder layer, without fused modules.
DEFAULT_TARGET_MODULES: Final = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
)

MOST_WEIGHT_MEMORY: Final = MOST_BYTES


@dataclass(frozen=True)
class SoleValue:
    """An option that accepts only one value here."""

    value: Any
    reason: str  # reason why other values are refused


SOLE_VALUES: Final[dict[str, SoleValue]] = {
    "remove_input_padding": SoleValue(ENABLE, "tokens are always packed"),
    "context_fmha": SoleValue(ENABLE, "attention never makes the matrix of scores"),
    "paged_kv_cache": SoleValue(ENABLE, "the KV cache is always paged"),
    "kv_cache_type": SoleValue(PAGED, "the KV cache is always paged"),
    "logits_dtype": SoleValue("float32", "logits are computed in float32"),
    "lora_ckpt_source": SoleValue("hf", "adapters are read in PEFT's format; convert others to it"),
}
"""TensorRT-LLM options whose other values make no sense here or are not supported."""


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """Dtypes of the plugins: a dtype's name, `auto` for the checkpoint's, or `disable`."""

    gpt_attention_plugin: str = AUTO
    gemm_plugin: str = AUTO
    lora_plugin: str = DISABLE
    dora_plugin: str = DISABLE
    remove_input_padding: str = ENABLE
    context_fmha: str = ENABLE
    paged_kv_cache: str = ENABLE


@dataclass(frozen=True, kw_only=True)
class LoraBuildConfig:
    """Adapters that an engine accepts."""

    lora_dir: tuple[Path, ...] = ()
    """PEFT adapters that are copied into the engine directory; in config.json, paths within it."""
    adapter_names: tuple[str, ...] = ()
    """Served name of each entry of lora_dir; () before the build: the directories' own names."""
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = limit("maximum rank of adapters", default=64, maximum=1 << 20)
    lora_target_modules: tuple[str, ...] = ()
    """Modules that adapters may change. (): those of the adapters in lora_dir, or all modules if lora_dir is empty."""
    max_extra_tokens: int = limit(
        "maximum tokens that an adapter may add to the model's vocabulary",
        default=0, minimum=0, maximum=1 << 16, is_omitted=True,
    )  # fmt: skip
    """Maximum number of tokens beyond the model's vocabulary that an adapter may bring."""
    long_lora_scaling_factors: tuple[int, ...] = limit(
        "factors by which adapters may divide rotary positions; an adapter with factor N can use N times as many "
        "positions (LongLoRA, context_length in adapter_config.json)",
        default=(), minimum=2, maximum=MOST_ROTARY_FACTOR, is_list=True, is_omitted=True,
    )  # fmt: skip
    """Factors by which adapters may divide rotary positions (vLLM's LongLoRA); ascending."""
    fully_sharded_loras: bool = False
    """True splits both matrices of an adapter among the ranks of tensor parallelism.

    False splits only the matrix that is cut with the layer.
    """

    @property
    def adapter_limits(self) -> AdapterLimits:
        """Limits that an engine with this config sets to each adapter."""
        return AdapterLimits(
            max_rank=self.max_lora_rank,
            max_extra_tokens=self.max_extra_tokens,
            rotary_factors=self.long_lora_scaling_factors,
        )

    def target_module_ids(self) -> list[int]:
        """Ids of lora_target_modules, in ascending order."""
        ids = {info.name: info.id for info in lora_modules()}
        return sorted(ids[name] for name in self.lora_target_modules)


@dataclass(frozen=True, kw_only=True)
class TensorRtBuildConfig:
    """Options of the tensorrt backend."""

    compute_capability: tuple[str, ...] = (CURRENT,)
    """Compute capabilities of the GPUs, one plan each: for example 8.6, or `current` for this machine's GPU."""
    weights: str = CONSTANTS


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Sizes and options of an engine."""

    max_batch_size: int = limit("maximum sequences in a step", default=2048, maximum=1 << 20)
    max_num_tokens: int = limit("maximum tokens in a step, prompts and answers together", default=8192, maximum=1 << 24)
    max_input_len: int | None = limit("maximum tokens of a prompt", default=None, maximum=1 << 30, unset="max_seq_len")
    """Maximum prompt length in tokens. None: max_seq_len.

    Encoders compute each input in one step, so their default is at most max_num_tokens.
    """
    max_seq_len: int | None = limit(
        "maximum tokens of a prompt and its answer",
        default=None, maximum=1 << 30, unset="the model's max_position_embeddings",
    )  # fmt: skip
    """Maximum length of prompt and answer together, in tokens. None: the model's max_position_embeddings."""
    max_beam_width: int = limit("maximum beams of a request", default=1, maximum=1 << 20)
    """Largest beam_width of a request; each beam counts towards max_batch_size."""
    max_encoder_input_len: int | None = limit(
        "maximum tokens of an encoder input, for models with an encoder",
        default=None, unset="max_num_tokens, or the model's max_position_embeddings if that is less",
    )  # fmt: skip
    """Maximum input length of an encoder before a decoder, in tokens; it computes each input in one step.

    None: max_num_tokens, or the model's max_position_embeddings if that is less.
    """
    tokens_per_block: int = limit("tokens in a block of the KV cache", default=32, maximum=1 << 16)
    kv_cache_type: str = PAGED
    logits_dtype: str = "float32"
    backend: str = NATIVE
    compress_weights: bool = False
    """True stores the bfloat16 weights of linear layers in twelve bits each, without loss."""
    weight_memory: int | None = None
    """Default limit in bytes for weights in memory; None: no limit.

    A native engine reads weights beyond the limit from the engine file when they are used. A TensorRT engine keeps them
    on the host and copies them to the GPU.
    """
    sparse_mlp: str = AUTO
    """Use of sparsity: ReLU-gated MLPs read only the active neurons' weights. `auto`: if the model allows it."""
    sparse_predictors: Path | None = None
    """Directory of PowerInfer's predictors, which close gates before they are computed. They change results.

    In config.json the directory's name, because the engine has its tensors.
    """
    lora_config: LoraBuildConfig = field(default_factory=LoraBuildConfig)
    plugin_config: PluginConfig = field(default_factory=PluginConfig)
    tensorrt_config: TensorRtBuildConfig | None = None
    """None: another backend, or the defaults."""

    @property
    def lora_enabled(self) -> bool:
        """True if the engine accepts adapters."""
        return self.plugin_config.lora_plugin != DISABLE

    @property
    def accepted_adapters(self) -> LoraBuildConfig | None:
        """Adapters that the engine accepts; None: none."""
        return self.lora_config if self.lora_enabled else None

    @property
    def dora_enabled(self) -> bool:
        """True if adapters may have DoRA magnitudes."""
        return self.plugin_config.dora_plugin == ENABLE

    @property
    def gives_weights_back(self) -> bool:
        """True if the weights can be read back, as the base of adapters.

        TensorRT plans do not return weights that are constants.
        """
        tensorrt = self.tensorrt_config
        return self.backend != TENSORRT or (tensorrt is not None and tensorrt.weights == EXTERNAL)

    def with_defaults(self, checkpoint: CheckpointConfig) -> BuildConfig:
        """Replaces values that mean "as in the checkpoint"; `auto` becomes its dtype."""
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
        """Maximum number of positions, under the adapter with the largest rotary divisor."""
        return checkpoint.max_position_embeddings * max(self.lora_config.long_lora_scaling_factors, default=1)

    def to_dict(self) -> dict[str, Any]:
        """The `build_config` of an engine's config.json."""
        result = _plain(self)
        result["plugin_config"] = _plain(self.plugin_config)
        result["lora_config"] = {
            **_plain(self.lora_config),
            "lora_dir": [path.as_posix() for path in self.lora_config.lora_dir],
        }
        # Omits options at their defaults, so that config.json of engines without them stays the same.
        omitted = [name for name, declared in LORA_LIMITS.items() if declared.is_omitted]
        for name in (*omitted, "fully_sharded_loras"):
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
        """Reads what to_dict() returned; notes problems in `source`."""
        plugins, lora = source.object("plugin_config"), source.object("lora_config")
        tensorrt = source.object("tensorrt_config", optional=True)
        values = {name: _limit_from_fields(source, name, declared) for name, declared in LIMITS.items()}
        values |= {name: source.string(name) for name in ("kv_cache_type", "logits_dtype", "backend")}
        predictors = source.optional_string("sparse_predictors")
        return cls(
            **values,
            compress_weights=source.boolean("compress_weights"),
            weight_memory=source.optional_integer("weight_memory", maximum=MOST_WEIGHT_MEMORY),
            sparse_mlp=source.string("sparse_mlp", choices=SPARSE_MLP, default=AUTO),
            sparse_predictors=None if predictors is None else Path(predictors),
            plugin_config=PluginConfig(
                **{item.name: plugins.string(item.name) for item in fields(PluginConfig)} if plugins else {}
            ),
            lora_config=_lora_from_fields(lora) if lora else LoraBuildConfig(),
            tensorrt_config=_tensorrt_from_fields(tensorrt) if tensorrt else None,
        )


LIMITS: Final = limits_of(BuildConfig)
LORA_LIMITS: Final = limits_of(LoraBuildConfig)


def _plain(config: Any) -> dict[str, Any]:
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _lora_from_fields(source: JsonFields) -> LoraBuildConfig:
    return LoraBuildConfig(
        lora_dir=tuple(Path(text) for text in source.strings("lora_dir")),
        adapter_names=source.strings("adapter_names"),
        lora_ckpt_source=source.string("lora_ckpt_source"),
        lora_target_modules=source.strings("lora_target_modules"),
        fully_sharded_loras=source.boolean("fully_sharded_loras", default=False),
        **{name: _limit_from_fields(source, name, declared) for name, declared in LORA_LIMITS.items()},
    )


def _limit_from_fields(source: JsonFields, name: str, declared: Limit) -> Any:
    if declared.is_list:
        return source.integers(name)
    if declared.maximum is None:
        return source.optional_integer(name)
    default = declared.default if declared.is_omitted else None
    return source.integer(name, minimum=declared.minimum, default=default)


def _tensorrt_from_fields(source: JsonFields) -> TensorRtBuildConfig:
    return TensorRtBuildConfig(
        compute_capability=source.strings("compute_capability"), weights=source.string("weights", choices=WEIGHTS)
    )
