"""Random adapters for engines of random models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from adaptrt import LoraConfig
from adaptrt._core import VOCABULARY_SLICE, LoraLayout, dtype_name, lora_modules
from adaptrt.runtime.compiled_engine import CompiledEngine
from adaptrt.tools.bench.executors import AdapterLibrary
from adaptrt.tools.bench.scenario_types import AdapterMix

from .kinds import VariedMix
from .model import IDS, random_adapter

LAYER_MODULES: Final = tuple(
    info.name for info in lora_modules() if info.parts == (info.name,) and not info.is_of_vocabulary
)
"""Modules of decoder layers. Fused ones are left out, because engines also adapt their parts."""


@dataclass(frozen=True)
class Variant:
    """A kind of adapter, described by its rows. Random values take as much time as trained ones."""

    vectors: int = 0
    """Vectors of each row besides A and B: MAGNITUDE, SHIFT, or both."""
    modules: tuple[str, ...] = LAYER_MODULES
    lm_head: bool = False
    rotary_factor: int = 1
    """Positions are divided by this number."""
    frozen_a: bool = False
    """True: all adapters of a rank have the same A, as with LoRA-FA."""


MAGNITUDE: Final = 1
SHIFT: Final = 2
VARIANTS: Final = {
    "": Variant(),
    "shift": Variant(SHIFT),
    "ia3": Variant(MAGNITUDE, ("attn_k", "attn_v", "mlp_gate")),
    "lm_head": Variant(lm_head=True),
    "rotary": Variant(rotary_factor=2),
    "frozen_a": Variant(frozen_a=True),
}


class RandomAdapters(AdapterLibrary):
    """Adapters of the same rank and kind differ in the first values of each matrix and vector.

    The LoRA cache keeps equal matrices once, so equal adapters would take no memory.
    """

    def __init__(self, engine: CompiledEngine) -> None:
        """The adapters change all linear layers of decoder layers that the engine adapts."""
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
        weights = number_matrices(weights, config, self.engine.program.lora, index, with_a=not VARIANTS[name].frozen_a)
        return LoraConfig(self.task_id(mix, index) if task_id is None else task_id, weights, config)

    def forget(self) -> None:
        """Frees the values."""
        self._made.clear()


def number_matrices(
    weights: npt.NDArray[np.generic], config: npt.NDArray[np.int32], layout: LoraLayout, index: int, *, with_a: bool
) -> npt.NDArray[np.generic]:
    """Returns a copy of an adapter's weights [rows, width] whose matrices and vectors start with a number.

    config: [rows, 4]. index: 0 to 16383. with_a: False leaves A unchanged. The numbers are exact in every dtype.
    """
    weights = weights.copy()
    digits = (np.array([index % 128, index // 128]) / 4096).astype(weights.dtype)
    for row, (module, layer, rank, vectors) in zip(weights, config.tolist(), strict=True):
        found = layout.sizes_of(layer, module)
        if found is None:  # a setting
            continue
        matrices = [rank * found.in_size, rank * found.out_size] + [found.out_size] * int(vectors).bit_count()
        first = 0
        for position, size in enumerate(matrices):
            values = row[first : first + found.experts * size].reshape(found.experts, size)
            if with_a or position > 0:
                values[:, :2] = digits
            first += found.experts * size
    return weights


def _variant_of(mix: AdapterMix) -> str:
    return mix.variant if isinstance(mix, VariedMix) else ""
