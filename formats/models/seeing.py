"""Config of language models whose prompts may have images."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.config import CheckpointConfig, added_later


@dataclass(frozen=True, kw_only=True)
class SeeingConfig(CheckpointConfig):
    """Config of a language model whose prompts may have images."""

    has_tower: bool = added_later(False)
    """True if the engine's directory has the vision tower, which then uses its part of each adapter."""
