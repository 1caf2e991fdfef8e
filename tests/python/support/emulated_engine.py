"""TensorRT engine directories whose plans and kernels are emulated."""

from __future__ import annotations

from pathlib import Path

import adaptrt_cuda_emulated

from support.emulated_plan import EmulatedContext
from support.stand_in_engine import StandInEngine, stand_in_engine


def emulated_engine(directory: Path, checkpoint: Path) -> StandInEngine:
    """Loads the engine in `directory`, which was built from `checkpoint`."""
    return stand_in_engine(directory, checkpoint, adaptrt_cuda_emulated.CudaDevice(), EmulatedContext)
