"""Adapters that begin with a share of the base's weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA).

Their training took s B0 A0 out of each weight W, so that the module computes (W - s B0 A0) x + s B A x. Over W itself
that is LoRA of twice the rank, with the columns of B and -B0 beside one another and the rows of A above those of A0.
"""

from __future__ import annotations

import numpy as np

from ..._core import AdapterError
from .adapter import Adapter, Array, FloatArray
from .recognise import CONFIG_FILE


def over_the_unchanged_base(adapter: Adapter, initial: Adapter | None) -> None:
    """Makes the adapter what it is over the base from before its training.

    initial: the adapter as it was when its training began.

    Raises AdapterError without one that is needed, and for one that is not needed or is of another adapter.
    """
    config = adapter.directory / CONFIG_FILE
    if not adapter.base_changing_init:
        if initial is not None:
            raise AdapterError(f"{config}: its initialisation left the base as it was, but an initial adapter is given")
        return
    if initial is None:
        raise AdapterError(
            f'{config}: init_lora_weights = "{adapter.base_changing_init}": this initialisation changed the base '
            "model's weights, so the adapter is not all of the change; give the initial adapter, or save the adapter "
            "with PEFT's path_initial_model_for_weight_conversion to get a plain LoRA adapter"
        )
    if initial.base_changing_init or initial.is_dora:
        raise AdapterError(
            f"{initial.directory / CONFIG_FILE}: an initial adapter is plain LoRA, saved with init_lora_weights = true"
        )
    problems = []
    for key, tensors in adapter.modules.items():
        first = initial.modules.get(key)
        if first is None:
            problems.append(f"has no module '{key.path}'")
        elif (first.a.shape, first.b.shape, first.scale) != (tensors.a.shape, tensors.b.shape, tensors.scale):
            problems.append(f"module '{key.path}' has another rank, shape or scale than in {adapter.file}")
        else:
            tensors.a = np.concatenate([_wide(tensors.a), _wide(first.a)])
            tensors.b = np.concatenate([_wide(tensors.b), -_wide(first.b)], axis=1)
    problems += [f"module '{key.path}' is not in {adapter.file}" for key in initial.modules.keys() - adapter.modules]
    if problems:
        raise AdapterError(f"{initial.file}: " + "; ".join(problems))


def _wide(matrix: Array) -> FloatArray:
    return matrix.astype(np.float32)
