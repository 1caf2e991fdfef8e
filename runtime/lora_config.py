"""What LoraConfig.from_peft is made of: an adapter directory as the tensors of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import AdapterError
from ..builder.adapter import convert_adapter
from .engine import LoadedEngine, load_engine


def tensors_from_peft(
    directory: str | Path, engine: LoadedEngine | str | Path, magnitudes_normalized: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The weights and the config of an adapter for this engine; see LoraConfig.from_peft."""
    loaded = engine if isinstance(engine, LoadedEngine) else load_engine(engine)
    layout = loaded.lora
    if not layout.sites:
        raise AdapterError(
            f"{directory}: the engine {loaded.directory} was built without LoRA; build it with --lora_plugin"
        )
    converted = convert_adapter(
        directory,
        storage_dtype=layout.dtype,
        base=loaded.base_weights(),
        modules=loaded.adapted_modules,
        magnitudes_normalized=magnitudes_normalized,
        max_rank=layout.max_rank,
    )
    return converted.weights, converted.config
