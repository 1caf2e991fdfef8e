"""Options of an engine that is built on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Final

from ..._core import ConfigError, DType
from ...common.shown_value import shown
from ...formats.checkpoint.config import CheckpointConfig
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.engine.build_config import (
    AUTO,
    CUDA,
    ENABLE,
    LIMITS,
    LORA_LIMITS,
    NATIVE,
    BuildConfig,
    LoraBuildConfig,
    PluginConfig,
)
from ...formats.engine.limits import Limit, chosen_limits

SERVING_DEFAULTS: Final = {
    # Far more streams than a CPU can serve at reading speed; further requests wait in the queue.
    "max_batch_size": 256,
    # Equal to max_seq_len, so that every accepted prompt fits into one step, chunked or not.
    "max_num_tokens": 8192,
    # Longer prompts take a CPU minutes, so users have to ask for them.
    "max_seq_len": 8192,
}
"""Defaults that differ from those of `adaptrt build`."""
SERVING_BACKENDS: Final = (NATIVE, CUDA)
"""Backends whose engines can be built on first use."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and types of an engine that is built on first use. It accepts LoRA and DoRA adapters on every linear layer.

    None selects the default for serving. Raises ConfigError for sizes that no engine accepts.
    """

    dtype: DType | None = None
    """Type of a Hugging Face model's weights; default: the one in its config.json."""

    max_batch_size: int | None = None
    """Sequences in a step; default: 256."""
    max_num_tokens: int | None = None
    """Tokens in a step; default: 8192."""
    max_seq_len: int | None = None
    """Prompt and answer together; default: 8192, or the model's maximum (with adapters that divide positions: their
    maximum) if that is less."""
    max_input_len: int | None = None
    """Prompt length; default: max_seq_len."""
    max_beam_width: int | None = None
    """Beams of a request; default: 1."""
    max_lora_rank: int | None = None
    """Maximum adapter rank; default: 64."""
    max_extra_tokens: int | None = None
    """Tokens beyond the model's vocabulary that an adapter may add; default: 0."""
    long_lora_scaling_factors: tuple[int, ...] | None = None
    """Factors by which adapters may divide rotary positions; default: none."""
    quantization: QuantConfig | None = None
    """None: the weights keep their type."""
    int8_activations: bool = False
    """True: integer weights are multiplied with activations rounded to int8."""
    dequantize: bool = False
    """True: pre-quantised layers are stored in the engine's type."""
    int8_kv_cache: bool = False
    compress_weights: bool = False
    sparse_mlp: str = AUTO
    backend: str = NATIVE
    """Processor that runs the engine: `native` for CPUs, `cuda` for NVIDIA GPUs."""

    def __post_init__(self) -> None:
        """Raises ConfigError with all sizes that are out of range."""
        problems = []
        for name, limit in SERVING_LIMITS.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_list = limit.is_list and isinstance(value, Sequence) and not isinstance(value, str)
            if limit.is_list == is_list and all(_is_size(one, limit) for one in (value if is_list else (value,))):
                continue
            alias = f" ({VLLM_LIMITS[name]} in vLLM)" if name in VLLM_LIMITS else ""
            most = "or more" if limit.maximum is None else f"to {limit.maximum}"
            numbers = "a list of integers, each " if limit.is_list else ""
            problems.append(f"{name} is {shown(value)}{alias}; expected {numbers}{limit.minimum} {most}")
        if self.backend not in SERVING_BACKENDS:
            problems.append(f"backend is {shown(self.backend)}; expected {' or '.join(SERVING_BACKENDS)}")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != field.default)

    def build_config(self, checkpoint: CheckpointConfig) -> BuildConfig:
        """The build config for a checkpoint's engine, with all defaults filled in."""
        lora = LoraBuildConfig(**chosen_limits(LORA_LIMITS, vars(self)))
        longest = min(SERVING_DEFAULTS["max_seq_len"], BuildConfig(lora_config=lora).max_positions(checkpoint))
        config = BuildConfig(
            **{**SERVING_DEFAULTS, "max_seq_len": longest, **chosen_limits(LIMITS, vars(self))},
            compress_weights=self.compress_weights,
            sparse_mlp=self.sparse_mlp,
            backend=self.backend,
            lora_config=lora,
            plugin_config=PluginConfig(lora_plugin=AUTO, dora_plugin=ENABLE),
        )
        return config.with_defaults(checkpoint)


def _is_size(value: Any, limit: Limit) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and limit.accepts(int(value))


_LIMITS: Final = {**LIMITS, **LORA_LIMITS}
SERVING_LIMITS: Final = {item.name: _LIMITS[item.name] for item in fields(EngineOptions) if item.name in _LIMITS}
"""Limits that a user may choose on first use, in the order of EngineOptions."""
VLLM_LIMITS: Final = {
    "max_seq_len": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
}
"""Limits that vLLM has under another name."""
