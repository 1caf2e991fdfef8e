"""Virtual tokens before a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from .checked_fields import TENSOR, CheckedFields, integer, list_of, optional


@dataclass(eq=False)
class PromptTuningConfig(CheckedFields):
    """Request.prompt_tuning_config, which executors refuse.

    embedding_table: [virtual tokens, hidden_size], any array or tensor; the object itself is kept.
    """

    embedding_table: Annotated[Any, TENSOR]
    input_token_extra_ids: Annotated[list[int] | None, optional(list_of(integer(0)))] = None
