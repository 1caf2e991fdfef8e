"""VeRA's two random matrices (arXiv:2310.11454), shared by all of its modules: from the file, or made from their seed.

A module uses the first `in` columns of A and the first `out` rows of B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .adapter import Array, FloatArray
from .names import ModuleKey
from .peft_config import PeftConfig

VERA_A: Final = "base_model.vera_A"
VERA_B: Final = "base_model.vera_B"


def is_projection(name: str) -> bool:
    """True if a tensor is one of the two matrices; the adapter's name may follow."""
    return any(name == shared or name.startswith(f"{shared}.") for shared in (VERA_A, VERA_B))


def vera_projections(
    tensors: Mapping[str, Array], keys: Iterable[ModuleKey], config: PeftConfig, modules: AdaptedModules | None
) -> dict[str, FloatArray]:
    """Returns float32 A [rank, in] and B [out, rank], large enough for the adapter's largest module.

    tensors: the file's tensors.
    keys: the adapter's modules.

    Raises AdapterError, whose text begins with the problem: if the model is not known, if the matrices of the file are
    too small, or if they must be made from their seed and torch is not installed.
    """
    if modules is None:
        raise AdapterError("VeRA's modules share matrices that are cut to the sizes of layers; give the base model")
    found_modules = [modules.find(key.path) for key in keys]
    sizes = [(module.in_size, module.out_size) for module in found_modules if module is not None] or [(0, 0)]
    largest_in, largest_out = (max(size[side] for size in sizes) for side in (0, 1))
    shapes = {VERA_A: (config.rank, largest_in), VERA_B: (largest_out, config.rank)}
    stored = {name: tensor for name, tensor in tensors.items() if is_projection(name)}
    if not stored:
        return _from_seed(config.projection_seed, shapes)
    found = {}
    for shared, shape in shapes.items():
        names = [name for name in stored if name == shared or name.startswith(f"{shared}.")]
        if len(names) != 1:
            raise AdapterError(f"expected one tensor {shared}, found {len(names)}")
        array = stored[names[0]].astype(np.float32)
        if array.ndim != 2 or any(has < needed for has, needed in zip(array.shape, shape, strict=True)):
            raise AdapterError(
                f"tensor '{names[0]}': has the shape {list(array.shape)}, expected {list(shape)} at least"
            )
        if not np.isfinite(array).all():
            raise AdapterError(f"tensor '{names[0]}': has values that are NaN or infinite")
        found[shared] = array
    return found


def _from_seed(seed: int, shapes: Mapping[str, tuple[int, int]]) -> dict[str, FloatArray]:
    """Makes the matrices as PEFT does: with torch's generator, A first, uniform within sqrt(6 / columns)."""
    try:
        import torch
    except ImportError:
        raise AdapterError(
            f"VeRA's shared matrices are not in the file, and torch, which makes them from projection_prng_key {seed}, "
            "is not installed"
        ) from None
    generator = torch.Generator(device="cpu").manual_seed(seed)
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(shape[1]))
        made[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator).numpy()
    return made
