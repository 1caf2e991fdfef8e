"""PEFT adapter directories: tensors taken apart by module and checked against the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..._core import AdapterError, CheckpointError, DType, all_finite
from ..checkpoint.pickled_file import PickledFile
from ..network.adapter_sites import AdaptedModules
from ..safetensors_stream import SafetensorsReader
from .names import ModuleKey, Role, parse_tensor_name
from .peft_config import PeftLoraConfig, read_peft_config

SAFETENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

# In an adapter file's metadata: its DoRA magnitudes are m / ||W + s B A||.
# docs/decisions/dora-normalisation-mark.md has the reasons.
MAGNITUDES_KEY = "adaptrt.dora_magnitudes"
MAGNITUDES_NORMALIZED = "normalized"

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

DTYPES = {
    np.dtype(np.float32): DType.FLOAT32,
    np.dtype(np.float16): DType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16,
}
"""Types that tensors are kept in; float64 becomes float32."""
_ACCEPTED_DTYPES = (*DTYPES, np.dtype(np.float64))


@dataclass
class ModuleTensors:
    """The tensors of one adapted module, contiguous, each in one of DTYPES."""

    a: Array  # [rank, in]
    b: Array  # [out, rank], without the scale
    magnitude: Array | None  # [out], DoRA only
    names: dict[Role, str]  # as in the file

    @property
    def rank(self) -> int:
        """A's first dimension."""
        return int(self.a.shape[0])

    def parts(self) -> Iterator[tuple[Role, Array]]:
        """In the order in which a row has them."""
        yield Role.A, self.a
        yield Role.B, self.b
        if self.magnitude is not None:
            yield Role.MAGNITUDE, self.magnitude


@dataclass
class PeftAdapter:
    """A PEFT adapter whose every tensor and field is accounted for."""

    directory: Path
    file: Path
    config: PeftLoraConfig
    # In the order of rows: by layer, then by module id.
    modules: dict[ModuleKey, ModuleTensors]
    # All tensors as stored, by name.
    tensors: dict[str, Array] = field(repr=False)
    magnitudes_normalized: bool = False

    def scale_of(self, key: ModuleKey) -> float:
        """What B @ A of this module is multiplied by."""
        return self.config.scale_of(key.path)


def read_peft_adapter(directory: Path, modules: AdaptedModules | None = None) -> PeftAdapter:
    """Reads adapter_config.json and adapter_model.safetensors, or else adapter_model.bin through torch.

    `modules` are those of the model that the adapter is for, where it is known: they say what paths mean.
    Raises AdapterError that names every field and tensor that cannot be used, and why.
    """
    problems: list[str] = []
    config: PeftLoraConfig | None = None
    if not directory.is_dir():
        raise AdapterError(f"{directory}: is not a directory; expected one with adapter_config.json")
    try:
        config = read_peft_config(directory)
    except AdapterError as error:
        problems.append(str(error))
    try:
        file, tensors, metadata = _read_file(directory)
    except AdapterError as error:
        raise AdapterError("; ".join([*problems, str(error)])) from error
    found, tensor_problems = _take_apart(tensors, modules)
    if config is not None and not tensor_problems:
        tensor_problems = _disagreements(found, config)
    state = metadata.get(MAGNITUDES_KEY)
    if state not in (None, MAGNITUDES_NORMALIZED):
        tensor_problems.append(f"metadata {MAGNITUDES_KEY} = '{state}'; accepted: {MAGNITUDES_NORMALIZED}")
    if tensor_problems:
        problems.append(f"{file}: " + "; ".join(tensor_problems))
    if problems or config is None:
        raise AdapterError("; ".join(problems))
    return PeftAdapter(directory, file, config, found, tensors, state == MAGNITUDES_NORMALIZED)


def _read_file(directory: Path) -> tuple[Path, dict[str, Array], Mapping[str, str]]:
    safetensors, pickle = directory / SAFETENSORS_FILE, directory / PICKLE_FILE
    if safetensors.is_file():
        reader = SafetensorsReader(safetensors, AdapterError)
        return safetensors, {name: reader.array(name) for name in reader.specs}, reader.metadata
    if pickle.is_file():
        return pickle, _read_pickle(pickle), {}
    raise AdapterError(f"{directory}: has neither {SAFETENSORS_FILE} nor {PICKLE_FILE}")


def _read_pickle(path: Path) -> dict[str, Array]:
    try:
        file = PickledFile(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    tensors = {}
    for name, spec in file.specs.items():
        tensors[name] = np.zeros(spec.shape, spec.dtype)
        first = 0
        # A tensor without dimensions has no rows and is refused for its shape.
        for piece in file.rows(name, 0, spec.shape[0]) if spec.shape else ():
            tensors[name][first : first + len(piece)] = piece
            first += len(piece)
    return tensors


def _take_apart(
    tensors: Mapping[str, Array], modules: AdaptedModules | None
) -> tuple[dict[ModuleKey, ModuleTensors], list[str]]:
    problems: list[str] = []
    found: dict[ModuleKey, dict[Role, str]] = {}
    adapters: dict[str, str] = {}
    for name in sorted(tensors):
        parsed = parse_tensor_name(name, modules)
        if isinstance(parsed, str):
            problems.append(f"tensor '{name}': {parsed}")
            continue
        adapters.setdefault(parsed.adapter, name)
        roles = found.setdefault(parsed.key, {})
        if parsed.role in roles:
            problems.append(f"tensor '{name}': is the same as '{roles[parsed.role]}' under another name")
            continue
        roles[parsed.role] = name
        problems += [f"tensor '{name}': {reason}" for reason in _value_problems(tensors[name], parsed.role)]
    if not tensors:
        problems.append("holds no tensors")
    if len(adapters) > 1:
        named = ", ".join(f"'{name}'" for name in adapters.values())
        problems.append(f"tensors of several adapters in one file: {named}")
    problems += _same_module_twice(found)
    for key, roles in found.items():
        problems += _shape_problems(key, roles, tensors)
    if problems:
        return {}, problems
    return {key: _module_tensors(found[key], tensors) for key in sorted(found)}, []


def _value_problems(tensor: Array, role: Role) -> list[str]:
    if tensor.dtype not in _ACCEPTED_DTYPES:
        accepted = ", ".join(dtype.name for dtype in _ACCEPTED_DTYPES)
        return [f"is {tensor.dtype.name}; accepted: {accepted}"]
    problems = []
    if 0 in tensor.shape or (role is not Role.MAGNITUDE and tensor.ndim != 2):
        expected = {Role.A: "[rank, in]", Role.B: "[out, rank]", Role.MAGNITUDE: "[out]"}[role]
        problems.append(f"has the shape {list(tensor.shape)}, expected {expected} without a zero")
    if (dtype := DTYPES.get(tensor.dtype)) is not None and all_finite(np.ascontiguousarray(tensor), dtype):
        return problems
    with np.errstate(over="ignore"):
        finite = np.isfinite(tensor.astype(np.float32, copy=False))
    if not finite.all():
        problems.append(f"{int(finite.size - finite.sum())} of {finite.size} values are NaN or beyond float32")
    return problems


def _same_module_twice(found: Mapping[ModuleKey, Mapping[Role, str]]) -> list[str]:
    problems = []
    seen: dict[tuple[int, int], ModuleKey] = {}
    for key in found:
        other = seen.setdefault((key.layer, key.module_id), key)
        if other is not key:
            both = f"'{other.path}' and '{key.path}'"
            problems.append(f"modules {both} are both {key.module.name} of layer {key.layer}")
    by_name = {(key.layer, key.module.name): key for key in found}
    for (layer, name), key in by_name.items():
        parts = [by_name[layer, part].path for part in key.module.parts if part != name and (layer, part) in by_name]
        problems += [f"module '{key.path}' and its part '{part}' are both adapted" for part in parts]
    return problems


def _shape_problems(key: ModuleKey, roles: Mapping[Role, str], tensors: Mapping[str, Array]) -> list[str]:
    missing = [role.value for role in (Role.A, Role.B) if role not in roles]
    if missing:
        present = ", ".join(f"'{name}'" for name in roles.values())
        return [f"module '{key.path}' has no {' and no '.join(missing)} beside {present}"]
    a, b = tensors[roles[Role.A]], tensors[roles[Role.B]]
    if a.ndim != 2 or b.ndim != 2:
        return []
    problems = []
    if a.shape[0] != b.shape[1]:
        problems.append(
            f"module '{key.path}': the rank is {a.shape[0]} in lora_A {list(a.shape)} and {b.shape[1]} "
            f"in lora_B {list(b.shape)}"
        )
    if not key.rows and not key.is_in_order and b.shape[0] % len(key.source_parts):
        problems.append(f"tensor '{roles[Role.B]}': has {b.shape[0]} outputs, which are not two halves of one size")
    if Role.MAGNITUDE in roles:
        shape = tensors[roles[Role.MAGNITUDE]].shape
        # The first DoRA code kept the magnitudes as the weight of a linear layer, [out, 1].
        if shape not in ((b.shape[0],), (b.shape[0], 1), (1, b.shape[0])):
            name = roles[Role.MAGNITUDE]
            outputs = f"lora_B has {b.shape[0]} outputs"
            problems.append(f"tensor '{name}': has the shape {list(shape)}, but {outputs}")
    return problems


def _module_tensors(roles: dict[Role, str], tensors: Mapping[str, Array]) -> ModuleTensors:
    def load(role: Role) -> Array:
        tensor = tensors[roles[role]]
        return np.ascontiguousarray(tensor, tensor.dtype if tensor.dtype in DTYPES else np.float32)

    magnitude = load(Role.MAGNITUDE).reshape(-1) if Role.MAGNITUDE in roles else None
    return ModuleTensors(load(Role.A), load(Role.B), magnitude, roles)


def _disagreements(modules: Mapping[ModuleKey, ModuleTensors], config: PeftLoraConfig) -> list[str]:
    """Where PEFT would not use the tensors as the file has them."""
    problems = []
    for key, tensors in modules.items():
        if not config.targets(key.path):
            problems.append(
                f"module '{key.path}' has tensors, but adapter_config.json's target_modules, exclude_modules "
                "and layers_to_transform leave it out"
            )
        if config.rank_of(key.path) != tensors.rank:
            problems.append(
                f"module '{key.path}': the rank is {tensors.rank} in lora_A, but {config.rank_of(key.path)} "
                "by adapter_config.json's r and rank_pattern"
            )
        if config.use_dora and tensors.magnitude is None:
            problems.append(f"module '{key.path}' has no DoRA magnitude, but adapter_config.json says use_dora")
        if not config.use_dora and tensors.magnitude is not None:
            name = tensors.names[Role.MAGNITUDE]
            problems.append(f"tensor '{name}': a magnitude, but adapter_config.json's use_dora is not true")
    return problems
