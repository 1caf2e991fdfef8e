"""IA3 (arXiv:2205.05638): factors of a module's outputs, or of a feedforward module's inputs.

Factors of outputs become a DoRA row with zero A and B; they also multiply the bias (biases.py). Factors of the inputs
of a gated MLP's last layer, W (l * activation(gate) * up), become factors of up's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModule, AdaptedModules
from .adapter import FloatArray, ModuleTensors
from .module_parts import ModuleParts
from .names import MODULES, ModuleKey, Role, module_at
from .peft_config import PeftConfig
from .problems import join_problems

FACTORS: Final = "ia3_l"
_LAST_OF_MLP: Final = "mlp_4h_to_h"
_UP: Final = "mlp_gate"


def ia3_modules(
    config: PeftConfig, found: Mapping[ModuleKey, ModuleParts], modules: AdaptedModules | None
) -> dict[ModuleKey, ModuleTensors]:
    """Returns the modules whose outputs are multiplied, in the order of rows.

    found: modules with the tensor FACTORS, [out, 1], or [1, in] for feedforward modules.

    Raises AdapterError, whose text begins with the problem, without the model, and for factors that rows cannot
    express.
    """
    if modules is None:
        raise AdapterError("IA3 depends on the model's biases and MLP; give the base model")
    factors: dict[ModuleKey, FloatArray] = {}
    names: dict[ModuleKey, list[str]] = {}
    problems = []
    for key, parts in found.items():
        try:
            target, outputs, values = _of_outputs(config, key, parts, modules)
        except AdapterError as error:
            problems.append(f"tensor '{parts.names[FACTORS]}': {error}")
            continue
        size = modules.by_path[target.path].out_size
        factors.setdefault(target, np.ones(size, np.float32))[outputs] *= values
        names.setdefault(target, []).append(parts.names[FACTORS])
    if problems:
        raise AdapterError(join_problems(problems))
    in_sizes = {key: modules.by_path[key.path].in_size for key in factors}
    return {
        key: _row(factors[key], in_sizes[key], " * ".join(names[key]), scales_bias=modules.by_path[key.path].has_bias)
        for key in sorted(factors)
    }


def _of_outputs(
    config: PeftConfig, key: ModuleKey, parts: ModuleParts, modules: AdaptedModules
) -> tuple[ModuleKey, list[int], FloatArray]:
    """Returns the module whose outputs are multiplied, their indices in the Hugging Face layer, and the factors."""
    path, layer = _in(modules, key)
    values = parts.wide(FACTORS)
    is_feedforward = config.is_feedforward(key.path)
    expected = (1, layer.in_size) if is_feedforward else (layer.out_size, 1)
    if values.shape != expected:
        raise AdapterError(f"has the shape {list(values.shape)}, expected {list(expected)}")
    if not is_feedforward:
        outputs = list(range(layer.out_size))
    else:
        path, layer, outputs = _up_before(modules, key, layer)
    target = module_at(path, modules)
    assert target is not None  # the path comes from the model
    return target, outputs, values.reshape(-1)


def _in(modules: AdaptedModules, key: ModuleKey) -> tuple[str, AdaptedModule]:
    layer = modules.find(key.path)
    if layer is None:
        raise AdapterError(f"module '{key.path}' does not exist in the model")
    return next(path for path, other in modules.by_path.items() if other is layer), layer


def _up_before(modules: AdaptedModules, key: ModuleKey, last: AdaptedModule) -> tuple[str, AdaptedModule, list[int]]:
    """Finds the up projection whose outputs `last` reads: its path, the layer, and the indices of its outputs."""
    for path, layer in modules.by_path.items():
        if last.module == _LAST_OF_MLP and layer.layer == last.layer and _UP in MODULES[layer.module].parts:
            rows = [row for rows in layer.rows for row in rows]
            return path, layer, rows[: last.in_size]
    raise AdapterError(f"multiplies the inputs of '{key.path}'; accepted: inputs of a gated MLP's last layer")


def _row(factors: FloatArray, inputs: int, name: str, *, scales_bias: bool) -> ModuleTensors:
    nothing = np.zeros((1, inputs), np.float32), np.zeros((len(factors), 1), np.float32)
    return ModuleTensors(*nothing, factors, 1.0, dict.fromkeys(Role, name), scales_bias=scales_bias)
