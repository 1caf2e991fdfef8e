"""Options of an engine that is built on first use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from ..._core import DType
from ...formats.checkpoint.config import CheckpointConfig
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.engine.build_config import AUTO, ENABLE, BuildConfig, LoraBuildConfig, PluginConfig

DEFAULT_MAX_BATCH_SIZE: Final = 256
"""Far more streams than a CPU can serve at reading speed; further requests wait in the queue."""
DEFAULT_MAX_NUM_TOKENS: Final = 8192
"""Equal to DEFAULT_MAX_SEQ_LEN: every accepted prompt fits into one step, chunked or not."""
DEFAULT_MAX_SEQ_LEN: Final = 8192
"""Longer prompts take a CPU minutes, so users have to ask for them."""
DEFAULT_MAX_LORA_RANK: Final = 64


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and types of an engine that is built on first use. It accepts LoRA and DoRA adapters on every linear layer.

    None selects the default for serving.
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
    int8_kv_cache: bool = False
    compress_weights: bool = False
    sparse_mlp: str = AUTO

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != field.default)

    def build_config(self, checkpoint: CheckpointConfig) -> BuildConfig:
        """The build config for a checkpoint's engine, with all defaults filled in."""
        lora = LoraBuildConfig(
            max_lora_rank=_or(self.max_lora_rank, DEFAULT_MAX_LORA_RANK),
            max_extra_tokens=_or(self.max_extra_tokens, 0),
            long_lora_scaling_factors=tuple(sorted(self.long_lora_scaling_factors or ())),
        )
        longest = min(DEFAULT_MAX_SEQ_LEN, BuildConfig(lora_config=lora).max_positions(checkpoint))
        config = BuildConfig(
            max_batch_size=_or(self.max_batch_size, DEFAULT_MAX_BATCH_SIZE),
            max_num_tokens=_or(self.max_num_tokens, DEFAULT_MAX_NUM_TOKENS),
            max_seq_len=_or(self.max_seq_len, longest),
            max_input_len=self.max_input_len,
            max_beam_width=_or(self.max_beam_width, 1),
            compress_weights=self.compress_weights,
            sparse_mlp=self.sparse_mlp,
            lora_config=lora,
            plugin_config=PluginConfig(lora_plugin=AUTO, dora_plugin=ENABLE),
        )
        return config.with_defaults(checkpoint)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
