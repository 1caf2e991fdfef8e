"""Groups an adapter file's tensors by module; checks names, dtypes and shapes before any computation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ..._core import all_finite
from ...common.parallel import in_threads
from ...common.pauses import may_pause
from ..network.adapter_sites import AdaptedModules
from .adapter import DTYPES, Array, FloatArray
from .names import ModuleKey, parse_tensor_name

_ACCEPTED_DTYPES: Final = (*DTYPES, np.dtype(np.float64))
_NAMES_SHOWN: Final = 3


@dataclass(frozen=True)
class PartsLayout:
    """Tensors that one kind of adapter has for each module."""

    pattern: re.Pattern[str]
    """Pattern of tensor names, for parse_tensor_name()."""
    shapes: Mapping[str, tuple[str, ...]]
    """Names of the dimensions by role, such as ("rank", "in"). All tensors of a module agree on the size of a name."""
    variants: tuple[frozenset[str], ...]
    """Sets of roles that a module may have, the smallest set first."""
    may_be_empty: bool = False
    """True if a dimension may be zero."""


@dataclass
class ModuleParts:
    """The tensors of one module."""

    names: dict[str, str] = field(default_factory=dict)
    """Names in the file, by role."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """Contiguous arrays by role, each in one of DTYPES, with the layout's number of dimensions."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the dimensions, by name."""

    def wide(self, role: str) -> FloatArray:
        """Returns a tensor as float32."""
        return self.arrays[role].astype(np.float32, copy=False)


def parts_by_module(
    tensors: Mapping[str, Array], layout: PartsLayout, modules: AdaptedModules | None
) -> tuple[dict[ModuleKey, ModuleParts], list[str]]:
    """Returns the modules in the order of rows, or none and the problems."""
    problems: list[str] = []
    found: dict[ModuleKey, ModuleParts] = {}
    adapters: dict[str, str] = {}
    unusable: dict[str, list[str]] = {}
    names = {name: parse_tensor_name(name, modules, layout.pattern) for name in sorted(tensors)}
    parsed_names = [(name, parsed.role) for name, parsed in names.items() if not isinstance(parsed, str)]

    def check(named: tuple[str, str]) -> list[str]:
        name, role = named
        reasons = _value_problems(tensors[name], layout.shapes[role], layout.may_be_empty)
        may_pause()
        return reasons

    reasons_of = dict(zip((name for name, _ in parsed_names), in_threads(check, parsed_names), strict=True))
    for name, parsed in names.items():
        if isinstance(parsed, str):
            unusable.setdefault(parsed, []).append(name)
            continue
        adapters.setdefault(parsed.adapter, name)
        parts = found.setdefault(parsed.key, ModuleParts())
        if parsed.role in parts.names:
            problems.append(f"tensor '{name}': is the same as '{parts.names[parsed.role]}' under another name")
            continue
        parts.names[parsed.role] = name
        shape = layout.shapes[parsed.role]
        reasons = reasons_of[name]
        problems += [f"tensor '{name}': {reason}" for reason in reasons]
        if not reasons:
            parts.arrays[parsed.role] = _loaded(tensors[name], shape)
    problems = [_unusable(names, reason) for reason, names in unusable.items()] + problems
    if not tensors:
        problems.append("holds no tensors")
    if len(adapters) > 1:
        named = ", ".join(f"'{name}'" for name in adapters.values())
        problems.append(f"tensors of several adapters in one file: {named}")
    problems += _same_module_twice(found)
    for key, parts in found.items():
        problems += _incomplete(key, parts, layout) or _sizes(key, parts, layout)
    return ({}, problems) if problems else ({key: found[key] for key in sorted(found)}, [])


def _unusable(names: list[str], reason: str) -> str:
    if len(names) <= _NAMES_SHOWN:
        return "; ".join(f"tensor '{name}': {reason}" for name in names)
    shown = ", ".join(f"'{name}'" for name in names[:_NAMES_SHOWN])
    return f"{len(names)} tensors, such as {shown}: {reason}"


def _value_problems(tensor: Array, shape: tuple[str, ...], may_be_empty: bool) -> list[str]:
    if tensor.dtype not in _ACCEPTED_DTYPES:
        accepted = ", ".join(dtype.name for dtype in _ACCEPTED_DTYPES)
        return [f"is {tensor.dtype.name}; accepted: {accepted}"]
    problems = []
    if (0 in tensor.shape and not may_be_empty) or not _fits(tensor.shape, shape):
        without = "" if may_be_empty else " without a zero"
        problems.append(f"has the shape {list(tensor.shape)}, expected [{', '.join(shape)}]{without}")
    if (dtype := DTYPES.get(tensor.dtype)) is not None and all_finite(np.ascontiguousarray(tensor), dtype):
        return problems
    with np.errstate(over="ignore"):
        finite = np.isfinite(tensor.astype(np.float32, copy=False))
    if not finite.all():
        problems.append(f"{int(finite.size - finite.sum())} of {finite.size} values are NaN or beyond float32")
    return problems


def _fits(shape: tuple[int, ...], names: tuple[str, ...]) -> bool:
    # Vectors may also be stored as a row or a column: the first DoRA code had magnitudes of [out, 1].
    return len(shape) == len(names) or (len(names) == 1 and len(shape) == 2 and 1 in shape)


def _loaded(tensor: Array, shape: tuple[str, ...]) -> Array:
    loaded = np.ascontiguousarray(tensor, tensor.dtype if tensor.dtype in DTYPES else np.float32)
    return loaded.reshape(-1) if len(shape) == 1 else loaded


def _same_module_twice(found: Mapping[ModuleKey, ModuleParts]) -> list[str]:
    problems = []
    seen: dict[tuple[int, int, int], ModuleKey] = {}
    for key in found:
        other = seen.setdefault((key.layer, key.module_id, key.expert), key)
        if other is not key:
            both = f"'{other.path}' and '{key.path}'"
            problems.append(f"modules {both} are both {key.module.name} of layer {key.layer}")
    by_name = {(key.layer, key.module.name): key for key in found}
    for (layer, name), key in by_name.items():
        parts = [by_name[layer, part].path for part in key.module.parts if part != name and (layer, part) in by_name]
        problems += [f"module '{key.path}' and its part '{part}' are both adapted" for part in parts]
    return problems


def _incomplete(key: ModuleKey, parts: ModuleParts, layout: PartsLayout) -> list[str]:
    roles = parts.names.keys()
    if roles in layout.variants:
        return []
    present = ", ".join(f"'{name}'" for name in parts.names.values())
    missing = min((variant - roles for variant in layout.variants), key=len)
    if missing:
        return [f"module '{key.path}' has {present}, but no {' and no '.join(sorted(missing))}"]
    return [f"module '{key.path}' has tensors that do not belong together: {present}"]


def _sizes(key: ModuleKey, parts: ModuleParts, layout: PartsLayout) -> list[str]:
    problems = []
    said: dict[str, str] = {}
    for role, array in parts.arrays.items():
        for dimension, size in zip(layout.shapes[role], array.shape, strict=True):
            where = f"in {role} {list(array.shape)}"
            if parts.sizes.setdefault(dimension, size) != size:
                before = f"{parts.sizes[dimension]} {said[dimension]}"
                problems.append(f"module '{key.path}': {dimension} is {before} and {size} {where}")
            said.setdefault(dimension, where)
    return problems


def ranks_above(max_rank: int | None, ranks: Mapping[ModuleKey, int]) -> list[str]:
    """Lists ranks above the limit; None: no limit.

    Call it before multiplying anything, because products of ranks may be large.
    """
    above = {key: rank for key, rank in ranks.items() if max_rank is not None and rank > max_rank}
    if not above:
        return []
    largest = max(above, key=above.__getitem__)
    others = f", and so are those of {len(above) - 1} other modules" if len(above) > 1 else ""
    return [f"module '{largest.path}': the rank {above[largest]} is above max_lora_rank {max_rank}{others}"]
