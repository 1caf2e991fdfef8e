"""What families have in common that are an encoder alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.config import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(CheckpointConfig):
    """Of models that give hidden states, or classes, and no tokens."""

    has_lm_head: bool = False

    @property
    def is_encoder_only(self) -> bool:
        """Tokens see those behind them as well."""
        return True

    def describe_depth(self) -> str:
        """What people read: 12 encoder layers."""
        return f"{self.num_hidden_layers} encoder layers"

    def describe_kv_cache(self, tokens_per_block: int) -> str:
        """What people read."""
        return "none: it is an encoder"

    def inconsistencies(self) -> list[str]:
        """What is wrong between fields that are each acceptable alone."""
        problems = super().inconsistencies()
        if self.has_lm_head:
            problems.append(f"has_lm_head is true; {self.architecture} is an encoder and has none")
        if self.int8_kv_cache:
            problems.append("kv_cache_quant_algo is INT8; an encoder keeps no keys and values")
        return problems
