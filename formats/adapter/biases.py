"""Trained biases, and biases of the base that IA3 multiplies, as additions to a layer's outputs.

Rows have no bias. They have a shift, which is added to the base's own bias (docs/formats.md):

    a trained bias           shift = bias - base's bias
    IA3, l * (W x + bias)    shift = (l - 1) * base's bias
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .adapter import Adapter, Array, FloatArray, ModuleTensors
from .base_weights import BaseWeights
from .module_parts import ModuleParts, PartsLayout, parts_by_module
from .names import PEFT_PREFIX, ModuleKey, Role
from .problems import join_problems

_BIAS: Final = "bias"
_LAYOUT: Final = PartsLayout(
    # PEFT calls an adapted layer's original `base_layer`; releases before 0.7 did not.
    re.compile(r"(?P<path>.+?)(?:\.base_layer|\.modules_to_save)?\.(?P<role>bias)(?P<adapter>)"),
    {_BIAS: ("out",)},
    (frozenset((_BIAS,)),),
)


def is_trained_bias(name: str) -> bool:
    """True if a tensor of an adapter is the bias of one of the base's layers."""
    return name.endswith(".bias") and re.search(r"\.lora_B(\.[^.]+)?\.bias$", name) is None


def path_of_bias(name: str) -> str:
    """Returns the path of the layer that a trained bias belongs to."""
    match = _LAYOUT.pattern.fullmatch(name.removeprefix(PEFT_PREFIX))
    return name if match is None else match["path"]


def trained_biases(
    tensors: Mapping[str, Array], modules: AdaptedModules | None
) -> tuple[dict[ModuleKey, ModuleParts], list[str]]:
    """Returns the trained biases by module, or none and the problems."""
    return parts_by_module(tensors, _LAYOUT, modules) if tensors else ({}, [])


def add_trained_biases(
    served: dict[ModuleKey, ModuleTensors], biases: Mapping[ModuleKey, ModuleParts], modules: AdaptedModules | None
) -> dict[ModuleKey, ModuleTensors]:
    """Adds trained biases to the modules, in the order of rows. A module that has only a bias gets zero A and B.

    Raises AdapterError, whose text begins with the problem, if the model's layer has no such bias, and for a module
    without A and B if the model is not known.
    """
    problems = []
    for key, parts in biases.items():
        name, bias = parts.names[_BIAS], parts.arrays[_BIAS]
        layer = None if modules is None else modules.find(key.path)
        if layer is not None and (not layer.has_bias or layer.out_size != len(bias)):
            has = f"one of {layer.out_size}" if layer.has_bias else "none"
            problems.append(f"tensor '{name}': a bias of {len(bias)} outputs, but the model's layer has {has}")
        elif key in served:
            served[key].bias = bias
            served[key].names[Role.SHIFT] = name
        elif layer is None:
            problems.append(f"tensor '{name}': a bias of a layer without A and B; give the base model")
        else:
            nothing = np.zeros((1, layer.in_size), np.float32), np.zeros((len(bias), 1), np.float32)
            served[key] = ModuleTensors(*nothing, None, 1.0, dict.fromkeys(Role, name), bias=bias)
    if problems:
        raise AdapterError(join_problems(problems))
    return {key: served[key] for key in sorted(served)}


def make_shifts(adapter: Adapter, base: BaseWeights | None) -> None:
    """Computes the shifts that depend on the base's biases.

    Raises AdapterError if the base is needed and missing, or has other biases.
    """
    problems = []
    for key, tensors in adapter.modules.items():
        if tensors.bias is None and not tensors.scales_bias:
            continue
        if base is None:
            raise AdapterError(f"{adapter.file}: its biases depend on the base model's; give the base model")
        of_base = base.bias(key)
        if of_base is None or len(of_base) != len(tensors.b):
            has = "none" if of_base is None else f"{len(of_base)}"
            problems.append(
                f"tensor '{tensors.names[Role.SHIFT]}': belongs to {len(tensors.b)} biases of '{key.path}', but "
                f"{base.describe()} has {has} there"
            )
            continue
        tensors.shift = _shift(tensors, of_base)
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))


def leave_shifts_open(adapter: Adapter) -> None:
    """Gives rows zero shifts as placeholders, for callers that read only the sizes of rows."""
    for tensors in adapter.modules.values():
        if tensors.has_shift and tensors.shift is None:
            tensors.shift = np.zeros(len(tensors.b), np.float32)


def _shift(tensors: ModuleTensors, of_base: FloatArray) -> FloatArray:
    shift = np.zeros(len(tensors.b), np.float32) if tensors.shift is None else tensors.shift.astype(np.float32)
    if tensors.bias is not None:
        shift = shift + (tensors.bias.astype(np.float32) - of_base)
    if tensors.scales_bias and tensors.magnitude is not None:
        shift = shift + (tensors.magnitude.astype(np.float32) - 1) * of_base
    return shift
