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
