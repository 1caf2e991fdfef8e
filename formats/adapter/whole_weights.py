"""Whole weights of lm_head and the embedding that come with an adapter.

PEFT saves a module of modules_to_save whole, and it replaces the base's module. With LoRA on lm_head or the embedding,
and with save_embedding_layers, PEFT also saves the base's own weights and puts them back into the base when it loads
the adapter; a tied layer then gets them too.

The change W' - W becomes LoRA. Its rank is the number of tokens that differ (token_rows.py). If more than hidden_size
tokens differ, the rank is hidden_size: one matrix is W' - W, the other the identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError, DType
from ..network.adapter_sites import AdaptedModule, AdaptedModules, vocabulary_slices
from .adapter import DTYPES, NUMPY_DTYPES, Adapter, Array, FloatArray, ModuleTensors, WholeWeight
from .base_weights import BaseWeights
from .names import EMBEDDING, PEFT_PREFIX, ModuleKey, Role, module_at
from .peft_config import PeftConfig
from .problems import join_problems
from .token_rows import as_lora_of_tokens

_NAME: Final = re.compile(
    r"(?P<path>.+?)(?:(?:\.token_adapter)?\.(?P<kept>base_layer|original_module)|\.modules_to_save(?:\.[^.]+)?)?\.weight"
)
_ROUNDING: Final = 2.0**-8
"""Relative rounding error of bfloat16, the coarsest type that a copy of the base's weight may have."""
_SMALLEST: Final = 2.0**-24
"""Absolute rounding error of float16's smallest numbers."""


def whole_weights(tensors: Mapping[str, Array], modules: AdaptedModules | None) -> dict[str, ModuleKey]:
    """Selects the tensors of a file that are weights of lm_head and of the embedding, by name."""
    found = {}
    for name in tensors:
        match = _NAME.fullmatch(name)
        key = None if match is None else module_at(match["path"].removeprefix(PEFT_PREFIX), modules)
        if key is not None and key.module.is_of_vocabulary:
            found[name] = key
    return found


def read_whole_weights(
    tensors: Mapping[str, Array], keys: Mapping[str, ModuleKey], config: PeftConfig | None
) -> tuple[list[WholeWeight], list[str]]:
    """Returns the whole weights for the `keys` that whole_weights() returned, or none and the problems."""
    problems: list[str] = []
    found: dict[tuple[ModuleKey, bool], WholeWeight] = {}
    for name, key in keys.items():
        tensor = tensors[name]
        if tensor.ndim != 2 or 0 in tensor.shape or tensor.dtype not in (*DTYPES, np.dtype(np.float64)):
            problems.append(f"tensor '{name}': is {tensor.dtype} {list(tensor.shape)}, expected [tokens, hidden size]")
            continue
        with np.errstate(over="ignore"):
            if not np.isfinite(tensor.astype(np.float32, copy=False)).all():
                problems.append(f"tensor '{name}': has NaN, or values beyond float32")
        match = _NAME.fullmatch(name)
        kept = match is not None and match["kept"] is not None
        is_own = not kept and config is not None and (config.saves(key.path) or config.ties_weights)
        other = found.setdefault((key, is_own), WholeWeight(key, name, tensor, is_own))
        if other.values is not tensor and not np.array_equal(other.values, tensor):
            problems.append(f"tensors '{other.name}' and '{name}' are the same weight with different values")
    return ([], problems) if problems else (list(found.values()), [])


def add_whole_weights(
    adapter: Adapter,
    base: BaseWeights | None,
    modules: AdaptedModules | None,
    dtype: DType,
    max_rank: int | None,
    *,
    left_open: bool,
) -> None:
    """Adds modules for the whole weights that differ from the base's, or merges them into existing modules.

    dtype: dtype of the rows. A token counts as unchanged if its row, rounded to `dtype`, equals the base's.
    left_open: True accepts a missing base. Then weights of modules_to_save count as changed in every token, and their
        rows have the right sizes but not their values; copies of the base's weights count as equal.

    Raises AdapterError if the base is missing, for weights of other sizes, and for ranks above max_rank.
    """
    weights = adapter.whole_weights
    if base is not None:
        weights = [weight for weight in weights if weight.is_own or not _is_copy(adapter, weight, base)]
    elif left_open:
        weights = [weight for weight in weights if weight.is_own]
    adapter.whole_weights = weights
    if not weights:
        return
    if adapter.base_changing_init and not all(weight.is_own for weight in weights):
        raise AdapterError(
            f"{adapter.file}: tensor '{weights[0].name}': is not the base's weight, which the initialisation "
            f'"{adapter.base_changing_init}" has changed'
        )
    if modules is None or (base is None and not left_open):
        raise AdapterError(
            f"{adapter.file}: tensor '{weights[0].name}': replaces the base's weight, or is a copy of it; "
            "give the base model"
        )
    problems = []
    adapter.whole_weights = []  # weights that change something
    for layer, weight in _places(adapter, weights, modules):
        key = _key_of(layer, adapter, modules)
        beside = adapter.modules.get(key)
        tokens, width = _sizes(layer)
        if weight.values.shape != (tokens - adapter.absent_tokens, width):
            problems.append(
                f"tensor '{weight.name}': is {list(weight.values.shape)}, and the model's '{key.path}' is "
                f"{[tokens, width]}"
            )
            continue
        if adapter.magnitudes_normalized and beside is not None and beside.magnitude is not None:
            problems.append(f"tensor '{weight.name}': its magnitudes are normalised already, by the base's weight")
            continue
        values = weight.values
        changed, delta = (np.arange(len(values)), None) if base is None else _change(values, base, key, dtype)
        if len(changed) == 0:
            continue
        adapter.whole_weights.append(weight)
        made = _together(_as_lora(weight.name, changed, delta, layer), beside, layer)
        if max_rank is not None and made.rank > max_rank:
            problems.append(_no_room(key, weight, layer, len(changed), made.rank, dtype, max_rank))
        adapter.modules[key] = made
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))


def _places(
    adapter: Adapter, weights: list[WholeWeight], modules: AdaptedModules
) -> list[tuple[AdaptedModule, WholeWeight]]:
    """Returns each layer's weight: its own, or the one that was put into the base for it or for a layer tied to it."""
    given: dict[tuple[str, bool], list[WholeWeight]] = {}
    for weight in weights:
        layer = modules.find(weight.key.path)
        if layer is None:
            raise AdapterError(f"{adapter.file}: module '{weight.key.path}' does not exist in the model")
        given.setdefault((layer.path, weight.is_own), []).append(weight)
    places = []
    for layer in modules.by_path.values():
        for is_own in (True, False):
            shared = modules.tied_with(layer) if layer.is_of_vocabulary and (adapter.ties_weights or not is_own) else []
            found = [weight for path in (layer.path, *shared) for weight in given.get((path, is_own), ())]
            for other in found[1:]:
                if not np.array_equal(found[0].values, other.values):
                    raise AdapterError(
                        f"{adapter.file}: tensors '{found[0].name}' and '{other.name}' differ, but the model has one "
                        "weight for both"
                    )
            if found:
                places.append((layer, found[0]))
                break
    return places


def _key_of(layer: AdaptedModule, adapter: Adapter, modules: AdaptedModules) -> ModuleKey:
    """Returns the adapter's key of the layer if it has one, otherwise a new key."""
    key = module_at(layer.path, modules)
    assert key is not None  # the path comes from the model
    return next((known for known in adapter.modules if known.row == key.row), key)


def _sizes(layer: AdaptedModule) -> tuple[int, int]:
    """Returns (number of tokens, hidden size)."""
    return (layer.in_size, layer.out_size) if layer.module == EMBEDDING else (layer.out_size, layer.in_size)


def _is_copy(adapter: Adapter, weight: WholeWeight, base: BaseWeights) -> bool:
    """True if the weight equals the base's within the rounding of both."""
    shape = base.shape(weight.key)
    if shape is None:
        raise AdapterError(f"{adapter.file}: tensor '{weight.name}': {base.describe()} has no such weight")
    tokens, width = shape[::-1] if weight.key.module.name == EMBEDDING else shape
    if weight.values.shape != (tokens - adapter.absent_tokens, width):
        return False
    first = 0
    rounding = base.rounding(weight.key)
    for block in _rows(base, weight.key, len(weight.values)):
        rows = weight.values[first : first + len(block)].astype(np.float32)
        first += len(block)
        sizes = np.abs(block)
        steps = sizes * _ROUNDING + sizes.max(axis=1, keepdims=True) * rounding + _SMALLEST
        if not (np.abs(rows - block) <= steps).all():
            return False
    return True


def _rows(base: BaseWeights, key: ModuleKey, count: int) -> Iterator[FloatArray]:
    """Yields the rows of the first `count` tokens of the base's weight, in blocks."""
    for block in base.row_blocks(key):
        rows = block.T if key.module.name == EMBEDDING else block
        if count > 0:
            yield rows[:count]
        count -= len(rows)


def _change(values: Array, base: BaseWeights, key: ModuleKey, dtype: DType) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Returns the tokens whose rows differ from the base's, and the differences, float32 [tokens that differ, in]."""
    changed, deltas = [], []
    first = 0
    for block in _rows(base, key, len(values)):
        rows = values[first : first + len(block)].astype(np.float32)
        rounded = rows.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
        differ = np.flatnonzero((rows != block).any(axis=1) & (rounded != block).any(axis=1))
        changed.append(differ + first)
        deltas.append(rows[differ] - block[differ])
        first += len(block)
    return np.concatenate(changed), np.concatenate(deltas)


def _as_lora(name: str, changed: npt.NDArray[np.intp], delta: FloatArray | None, layer: AdaptedModule) -> ModuleTensors:
    """Returns LoRA that adds `delta` to the rows of the `changed` tokens; None: zeros of the right shapes."""
    tokens, width = _sizes(layer)
    of_embedding = layer.module == EMBEDDING
    if delta is None:
        rank = min(len(changed), width)
        a, b = (np.zeros(shape, np.float32) for shape in ((rank, layer.in_size), (layer.out_size, rank)))
    elif len(changed) <= width:
        return as_lora_of_tokens(name, changed, delta, tokens, of_embedding=of_embedding)
    else:
        whole = np.zeros((tokens, width), np.float32)
        whole[changed] = delta
        a, b = _factors(np.ascontiguousarray(whole.T) if of_embedding else whole, layer)
    return ModuleTensors(a, b, None, 1.0, dict.fromkeys((Role.A, Role.B), name))


def _factors(change: FloatArray, layer: AdaptedModule) -> tuple[FloatArray, FloatArray]:
    """Returns A and B, of rank hidden size, for a change [out, in]."""
    _, width = _sizes(layer)
    identity = np.eye(width, dtype=np.float32)
    return (change, identity) if layer.module == EMBEDDING else (identity, change)


def _together(change: ModuleTensors, beside: ModuleTensors | None, layer: AdaptedModule) -> ModuleTensors:
    """Merges a whole change of a module with its A and B, or with its trained bias."""
    if beside is None:
        return change
    if not beside.a.any():
        return replace(beside, a=change.a, b=change.b, scale=1.0)
    a, scaled_b = beside.a.astype(np.float32), beside.b.astype(np.float32) * np.float32(beside.scale)
    if change.rank + beside.rank > _sizes(layer)[1]:
        a, b = _factors(change.b @ change.a + scaled_b @ a, layer)
    else:
        a, b = np.concatenate([change.a, a]), np.concatenate([change.b, scaled_b], axis=1)
    return replace(beside, a=a, b=b, scale=1.0)


def _no_room(
    key: ModuleKey,
    weight: WholeWeight,
    layer: AdaptedModule,
    changed: int,
    rank: int,
    dtype: DType,
    max_rank: int,
) -> str:
    tokens, width = _sizes(layer)
    elements = rank * (tokens + len(vocabulary_slices(tokens)) * width)
    num_bytes = elements * np.dtype(NUMPY_DTYPES[dtype]).itemsize
    return (
        f"tensor '{weight.name}': {changed} of {tokens} tokens of '{key.path}' differ from the base's, which needs "
        f"LoRA of rank {rank}, above max_lora_rank {max_rank}; build with --max_lora_rank {rank} (the adapter "
        f"takes {num_bytes / 2**20:.1f} MiB of the LoRA cache)"
    )
