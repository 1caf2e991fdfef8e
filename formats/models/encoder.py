"""Config of families that consist of an encoder only."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.config import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(CheckpointConfig):
    """Config of models that return hidden states or classes, and generate no tokens."""

    has_lm_head: bool = False

    @property
    def is_encoder_only(self) -> bool:
        """True: tokens also attend to later tokens."""
        return True

    def describe_depth(self) -> str:
        """Text for people: 12 encoder layers."""
        return f"{self.num_hidden_layers} encoder layers"

    def describe_kv_cache(self, tokens_per_block: int) -> str:
        """Text for people."""
        return "none: it is an encoder"

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        problems = super().inconsistencies()
        if self.has_lm_head:
            problems.append(f"has_lm_head is true; {self.architecture} is an encoder and has none")
        if self.int8_kv_cache:
            problems.append("kv_cache_quant_algo is INT8; an encoder keeps no keys and values")
        return problems
