"""Random adapters for engines of random models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from adaptrt import LoraConfig
from adaptrt._core import VOCABULARY_SLICE, dtype_name
from adaptrt.formats.engine.build_config import DEFAULT_TARGET_MODULES
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.executors import AdapterLibrary
from adaptrt.tools.bench.scenario_types import AdapterMix

from .kinds import VariedMix
from .model import IDS, random_adapter

MODULES: Final = (*DEFAULT_TARGET_MODULES, "moe_h_to_4h", "moe_4h_to_h", "moe_gate")


@dataclass(frozen=True)
class Variant:
    """A kind of adapter, as its rows. Random values cost the same as trained ones."""

    vectors: int = 0
    """Vectors of each row besides A and B: MAGNITUDE, SHIFT, or both."""
    modules: tuple[str, ...] = MODULES
    lm_head: bool = False
    rotary_factor: int = 1
    """Positions are divided by this number."""


MAGNITUDE: Final = 1
SHIFT: Final = 2
VARIANTS: Final = {
    "": Variant(),
    "shift": Variant(SHIFT),
    "ia3": Variant(MAGNITUDE, ("attn_k", "attn_v", "mlp_gate")),
    "lm_head": Variant(lm_head=True),
    "rotary": Variant(rotary_factor=2),
}


class RandomAdapters(AdapterLibrary):
    """Adapters of the same rank and kind share their values.

    The caches store each adapter separately under its task_id, and do not compare values. So times are those of
    different adapters.
    """

    def __init__(self, engine: NativeEngine) -> None:
        """Adapters change those of MODULES that the engine adapts."""
        super().__init__(engine)
        self._made: dict[tuple[int, bool, str], tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]] = {}

    def task_id(self, mix: AdapterMix, index: int) -> int:
        """Id of an adapter; the same in every scenario."""
        return list(VARIANTS).index(_variant_of(mix)) << 32 | super().task_id(mix, index)

    def tensors(self, mix: AdapterMix, index: int, *, task_id: int | None = None) -> LoraConfig:
        """An adapter with weights, under its own id or another one."""
        rank, dora, name = mix.rank(index), mix.is_dora(index), _variant_of(mix)
        if (rank, dora, name) not in self._made:
            layout, variant = self.engine.program.lora, VARIANTS[name]
            self._made[rank, dora, name] = random_adapter(
                layout,
                rank,
                seed=2 * rank + dora,
                vectors=variant.vectors | (MAGNITUDE if dora else 0),
                dtype=np.dtype(dtype_name(layout.dtype)),
                modules=[IDS[module] for module in variant.modules if IDS[module] in layout.target_modules],
                lm_head_slices=-(-self.engine.program.vocab_size // VOCABULARY_SLICE) if variant.lm_head else 0,
                rotary_factor=variant.rotary_factor,
            )
        weights, config = self._made[rank, dora, name]
        return LoraConfig(self.task_id(mix, index) if task_id is None else task_id, weights, config)

    def forget(self) -> None:
        """Frees the values."""
        self._made.clear()


def _variant_of(mix: AdapterMix) -> str:
    return mix.variant if isinstance(mix, VariedMix) else ""
