"""Splits adapters of the layer that makes keys and values of compressed rows (latent attention).

Networks multiply queries by the keys' weight W of each head, and what a head attended to by the values' weight. With
LoRA, a query q becomes q (W + s B A) = q W + s (q B) A, so the keys' adapter has the transposed B as its A, and the
transposed A as its B. Factors of the layer's outputs (DoRA, IA3) multiply values as elsewhere. For keys they multiply
the elements of q, which are outputs of the layer that makes queries. A shift of keys changes all scores of a query by
the same number, and so no probability.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..._core import AdapterError
from ..checkpoint.heads_apart import KEYS, VALUES, LayerOfHeads, head_path
from ..network.adapter_sites import KV_B, LATENT_MODULES, AdaptedModules
from .adapter import Adapter, Array, FloatArray, ModuleTensors
from .names import MODULES, ModuleKey, Role

_KEY, _VALUE = (MODULES[name].id for name in LATENT_MODULES)
_QUERIES: Final = ("attn_q", "attn_q_b")
"""Modules that make queries; a model has one of them."""


def split_layers_of_heads(adapter: Adapter, modules: AdaptedModules | None) -> None:
    """Replaces such layers by the layers of each head. Magnitudes must be normalised, and shifts made.

    Raises AdapterError for aLoRA, in which tokens before the invocation have the base's keys and values.
    """
    if modules is None or modules.layer_of_heads is None:
        return
    for key in [key for key in adapter.modules if key.module.name == KV_B]:
        if adapter.invocation_tokens:
            raise AdapterError(
                f"{adapter.file}: module '{key.path}': aLoRA changes keys and values from its invocation on, and this "
                "layer's adapters act on those of all tokens; accepted: aLoRA of other layers"
            )
        tensors = adapter.modules.pop(key)
        if tensors.magnitude is not None:
            _multiply_queries(adapter, key.layer, tensors, modules, modules.layer_of_heads)
        for head in range(modules.layer_of_heads.num_heads):
            adapter.modules |= _of_head(key, tensors, modules.layer_of_heads, head)
    adapter.modules = {key: adapter.modules[key] for key in sorted(adapter.modules)}


def _of_head(key: ModuleKey, tensors: ModuleTensors, layer: LayerOfHeads, head: int) -> dict[ModuleKey, ModuleTensors]:
    keys, values = (slice(rows.start, rows.stop) for rows in (layer.keys_of(head), layer.values_of(head)))

    def own(vector: Array | None) -> Array | None:
        return None if vector is None else vector[values]

    swapped = {Role.A: tensors.names[Role.B], Role.B: tensors.names[Role.A]}
    return {
        ModuleKey(key.layer, _KEY, head_path(key.path, head, KEYS), head): ModuleTensors(
            np.ascontiguousarray(tensors.b[keys].T), np.ascontiguousarray(tensors.a.T), None, tensors.scale, swapped
        ),
        ModuleKey(key.layer, _VALUE, head_path(key.path, head, VALUES), head): ModuleTensors(
            tensors.a,
            tensors.b[values],
            own(tensors.magnitude),
            tensors.scale,
            tensors.names,
            shift=own(tensors.shift),
        ),
    }


def _multiply_queries(
    adapter: Adapter, layer: int, of_heads: ModuleTensors, modules: AdaptedModules, heads: LayerOfHeads
) -> None:
    """Multiplies queries by the factors of keys."""
    path, module = next(
        (path, found) for path, found in modules.by_path.items() if found.layer == layer and found.module in _QUERIES
    )
    assert of_heads.magnitude is not None
    factors = np.ones((heads.num_heads, module.out_size // heads.num_heads), np.float32)
    for head in range(heads.num_heads):
        rows = heads.keys_of(head)
        factors[head, : heads.key_dim] = of_heads.magnitude[rows.start : rows.stop]
    key = next(
        (key for key in adapter.modules if (key.layer, key.module.name) == (layer, module.module)),
        ModuleKey(layer, MODULES[module.module].id, path, rows=module.rows),
    )
    tensors = adapter.modules.setdefault(key, _nothing(module.in_size, module.out_size, of_heads.names))
    tensors.names.setdefault(Role.MAGNITUDE, of_heads.names[Role.MAGNITUDE])
    flat = factors.reshape(-1)
    tensors.magnitude = flat if tensors.magnitude is None else _product(tensors.magnitude, flat)
    tensors.shift = None if tensors.shift is None else _product(tensors.shift, flat)


def _nothing(inputs: int, outputs: int, names: dict[Role, str]) -> ModuleTensors:
    """Returns matrices that change nothing."""
    return ModuleTensors(np.zeros((1, inputs), np.float32), np.zeros((outputs, 1), np.float32), None, 1.0, dict(names))


def _product(vector: Array, factors: FloatArray) -> FloatArray:
    return vector.astype(np.float32) * factors
