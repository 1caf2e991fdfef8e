"""Models whose sequences keep states in addition to keys and values: what their configs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checkpoint.config import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(CheckpointConfig):
    """Config of models with states."""

    @property
    def has_states(self) -> bool:
        """True if sequences keep states in addition to keys and values."""
        return True

    def layer_inconsistencies(self, name: str, layers: Sequence[int]) -> list[str]:
        """Lists what is wrong with a list of layer numbers."""
        if list(layers) == sorted(set(layers)) and all(layer < self.num_hidden_layers for layer in layers):
            return []
        return [f"{name} {list(layers)} must ascend and stay below {self.num_hidden_layers}"]
