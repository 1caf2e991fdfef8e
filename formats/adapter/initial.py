"""Adapters whose initialisation took a share out of the base's weights (PiSSA, OLoRA, CorDA, LoRA-GA).

Training began by removing s B0 A0 from each weight W, so the module computes (W - s B0 A0) x + s B A x. Over the
unchanged W this is LoRA of twice the rank: the columns of B are followed by those of -B0, and the rows of A by those of
A0.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..._core import AdapterError
from .adapter import Adapter, Array, FloatArray, ModuleTensors
from .base_weights import BaseWeights
from .problems import join_problems
from .recognise import CONFIG_FILE, INITIAL_DIRECTORY


def over_the_unchanged_base(adapter: Adapter, initial: Adapter | None) -> None:
    """Rewrites the adapter so that it applies to the base from before its training.

    initial: the adapter in the state in which its training began.

    Raises AdapterError if `initial` is missing, is not needed, or belongs to another adapter.
    """
    config = adapter.directory / CONFIG_FILE
    if not adapter.base_changing_init:
        if initial is not None:
            raise AdapterError(f"{config}: its initialisation left the base as it was, but an initial adapter is given")
        return
    if initial is None:
        remedy = f"give the initial adapter, or put it into the adapter's directory as {INITIAL_DIRECTORY}"
        if adapter.base_changing_init in _OF_THE_BASE_ALONE:
            remedy += ", convert it with the base model's directory"
        raise AdapterError(
            f'{config}: init_lora_weights = "{adapter.base_changing_init}": this initialisation changed the base '
            f"model's weights, so the adapter is only a part of the change; {remedy}, or save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion to get a plain LoRA adapter"
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
    problems += [
        f"module '{key.path}' is not in {adapter.file}" for key in initial.modules if key not in adapter.modules
    ]
    if problems:
        raise AdapterError(f"{initial.file}: " + join_problems(problems))


def initial_from_base(adapter: Adapter, base: BaseWeights) -> Adapter | None:
    """Computes the initial adapter if it follows from the base's weights; otherwise returns None.

    PiSSA took the largest singular values, OLoRA the first columns of Q and rows of R. Their products do not depend on
    the signs of the factors. The base must have every module (check_against_base()).
    """
    factors = _OF_THE_BASE_ALONE.get(adapter.base_changing_init)
    if factors is None:
        return None
    modules = {}
    for key, tensors in adapter.modules.items():
        weight = np.concatenate(list(base.row_blocks(key)))
        b, a = factors(weight, tensors.rank, tensors.scale)
        modules[key] = ModuleTensors(a, b, None, tensors.scale, tensors.names)
    return Adapter(adapter.directory, adapter.file, "LoRA", modules, {}, adapter.fan_in_fan_out)


def _pissa(weight: FloatArray, rank: int, scale: float) -> tuple[FloatArray, FloatArray]:
    """Returns B0 [out, rank] and A0 [rank, in]; the initialisation subtracted scale * B0 A0 from the weight."""
    left, values, right = np.linalg.svd(weight, full_matrices=False)
    return (left[:, :rank] * (values[:rank] / np.float32(scale))), right[:rank]


def _olora(weight: FloatArray, rank: int, scale: float) -> tuple[FloatArray, FloatArray]:
    del scale  # the share was removed with the adapter's own scale
    q, r = np.linalg.qr(weight)
    return q[:, :rank], r[:rank]


_OF_THE_BASE_ALONE: Final = {"olora": _olora, "pissa": _pissa}


def _wide(matrix: Array) -> FloatArray:
    return matrix.astype(np.float32)
