"""TensorRT's plans of an engine, and the names of their files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ....formats.engine.tensorrt.capability import name_in_file
from ....formats.engine.tensorrt.plan_config import TensorRtPlans
from .messages import Built

WEIGHTS_FILE: Final = "weights.safetensors"


@dataclass(frozen=True)
class CompiledPlans:
    """The written plans, and TensorRT's description of them."""

    plans: TensorRtPlans
    num_nodes: int
    """Number of nodes of the ONNX graph."""
    built: tuple[Built, ...]
    """Same order as `plans.files`."""


def plan_file(capability: str) -> str:
    """Name of the plan for a compute capability."""
    return f"rank0.{name_in_file(capability)}.plan"
