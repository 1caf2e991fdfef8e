"""Config of language models whose prompts may have images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..checkpoint.config import CheckpointConfig, added_later
from .tower import TowerConfig


@dataclass(frozen=True, kw_only=True)
class SeeingConfig(CheckpointConfig):
    """Config of a language model whose prompts may have images."""

    has_tower: bool = added_later(False)
    """True if the engine's directory has the vision tower, which then uses its part of each adapter."""

    def with_tower(self, tower: TowerConfig) -> SeeingConfig:
        """Returns the config for an engine with this tower."""
        return replace(self, has_tower=True)
