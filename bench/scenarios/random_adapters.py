"""Random adapters for engines of random models."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from adaptrt import LoraConfig
from adaptrt._core import dtype_name, lora_modules
from adaptrt.formats.engine.build_config import DEFAULT_TARGET_MODULES
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.executors import AdapterLibrary
from adaptrt.tools.bench.scenario_types import AdapterMix

from .model import random_adapter

MODULES: Final = (*DEFAULT_TARGET_MODULES, "moe_h_to_4h", "moe_4h_to_h", "moe_gate")


class RandomAdapters(AdapterLibrary):
    """Adapters of the same rank and kind share their values.

    The caches store each adapter separately under its task_id, and do not compare values. So times are those of
    different adapters.
    """

    def __init__(self, engine: NativeEngine) -> None:
        """Adapters change those of MODULES that the engine adapts."""
        super().__init__(engine)
        self._modules = [info.id for info in lora_modules() if info.name in MODULES]
        self._made: dict[tuple[int, bool], tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]] = {}

    def tensors(self, mix: AdapterMix, index: int, *, task_id: int | None = None) -> LoraConfig:
        """An adapter with weights, under its own id or another one."""
        rank, dora = mix.rank(index), mix.is_dora(index)
        if (rank, dora) not in self._made:
            layout = self.engine.program.lora
            self._made[rank, dora] = random_adapter(
                layout,
                rank,
                seed=2 * rank + dora,
                dora=dora,
                dtype=np.dtype(dtype_name(layout.dtype)),
                modules=[module for module in self._modules if module in layout.target_modules],
            )
        weights, config = self._made[rank, dora]
        return LoraConfig(self.task_id(mix, index) if task_id is None else task_id, weights, config)

    def forget(self) -> None:
        """Frees the values."""
        self._made.clear()
