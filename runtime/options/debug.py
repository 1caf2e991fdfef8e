"""TensorRT-LLM's selection of internal tensors to keep for debugging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .checked_fields import BOOL, TEXT, CheckedFields, integer, list_of


@dataclass(eq=False)
class DebugConfig(CheckedFields):
    """ExecutorConfig.debug_config. Executors reject it."""

    debug_input_tensors: Annotated[bool, BOOL] = False
    debug_output_tensors: Annotated[bool, BOOL] = False
    debug_tensor_names: Annotated[list[str], list_of(TEXT)] = field(default_factory=list)
    debug_tensors_max_iterations: Annotated[int, integer(0)] = 0
