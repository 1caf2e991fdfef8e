"""What an engine is built with: BuildConfig and its parts, with TensorRT-LLM's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from ..._core import dtype_name, lora_modules
from ...common.byte_size import MOST_BYTES
from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from .tensorrt.capability import CURRENT

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

MOST_WEIGHT_MEMORY: Final = MOST_BYTES

SIZES: Final = (
    "max_batch_size",
    "max_num_tokens",
    "max_input_len",
    "max_seq_len",
    "max_beam_width",
    "tokens_per_block",
)
"""Fields of BuildConfig that every engine has."""


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
        values: dict[str, Any] = {name: source.integer(name) for name in SIZES}
        values["max_encoder_input_len"] = source.optional_integer("max_encoder_input_len")
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
