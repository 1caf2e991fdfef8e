"""Tensors of Hugging Face models that checkpoints and engines do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class LeftOut:
    """Numbers of tensors."""

    num_vision: int = 0
    """Tensors of the vision tower."""
    num_prediction: int = 0
    """Tensors of heads that predict several tokens."""

    def describe(self) -> list[str]:
        """Returns a text for each kind, for something that has no vision tower."""
        kinds = (
            (self.num_vision, "of the vision tower; the engine only handles text"),
            (self.num_prediction, "of heads that predict several tokens (MTP), which are not used"),
        )
        return [f"{count} tensor{'s' if count > 1 else ''} {kind}" for count, kind in kinds if count > 0]


NOTHING_LEFT_OUT: Final = LeftOut()
