"""Plans of an engine directory: their description in config.json, and the check of their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from ...._core import EngineError
from ....common.file_digest import add_file
from ....common.json_fields import JsonFields

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest shape."""

PREFILL: Final = "prefill"
"""Profile for any step, with prefill chunks and decodes, up to max_num_tokens."""
DECODE: Final = "decode"
"""Profile for steps with only decodes: one token per sequence."""

INPUT: Final = "input"
OUTPUT: Final = "output"


def kv_pool_name(layer: int) -> str:
    """Name of the input with a layer's KV pool."""
    return f"kv_pool.{layer}"


def kv_pool_out_name(layer: int) -> str:
    """Name of the output with the same pool, written in place."""
    return f"kv_pool_out.{layer}"


@dataclass(frozen=True)
class StoredFile:
    """A file of the engine directory."""

    file: str
    """File name, without a directory."""
    num_bytes: int
    checksum: str
    """XXH3-128 of its bytes."""

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Describes a file that was written."""
        return cls(path.name, path.stat().st_size, _checksum(path))

    def check(self, directory: Path) -> Path:
        """Returns the path.

        Raises EngineError unless it is a plain file of the directory with this size and checksum.
        """
        path = directory / self.file
        if path.is_symlink() or not path.is_file():
            raise EngineError(f"{path}: is missing, or not a file")
        if path.stat().st_size != self.num_bytes:
            raise EngineError(f"{path}: has {path.stat().st_size} bytes; config.json was written for {self.num_bytes}")
        if _checksum(path) != self.checksum:
            raise EngineError(f"{path}: does not have its checksum; the file is damaged")
        return path


@dataclass(frozen=True)
class PlanFile:
    """The plan for one compute capability."""

    compute_capability: str
    stored: StoredFile


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """An input or output of the plans."""

    name: str
    dtype: str
    """numpy's name of the dtype."""
    shape: tuple[int, ...]
    """-1: known at run time."""
    mode: str
    """INPUT or OUTPUT."""
    alias: str | None
    """Outputs: the input that it overwrites; None: none."""
    profiles: tuple[Shapes, ...]
    """Inputs with a dynamic shape: smallest, usual and largest shape in each profile."""


@dataclass(frozen=True, kw_only=True)
class TensorRtPlans:
    """Plans of an engine, and their common properties."""

    package: str
    """Module that built the plans and runs them: `tensorrt` or `tensorrt_rtx`."""
    package_version: str
    plugin_version: str
    files: tuple[PlanFile, ...]
    weights: StoredFile | None
    """File with the weights that are inputs, by name; None: the plans contain them."""
    profiles: tuple[str, ...]
    """Names of the optimization profiles, in the plans' order."""
    tensors: tuple[TensorRow, ...]
    """Inputs and outputs, in the plans' order."""

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(stored.num_bytes for stored in self.stored_files())

    def stored_files(self) -> Iterator[StoredFile]:
        """Yields the plans, then the weights."""
        yield from (plan.stored for plan in self.files)
        if self.weights is not None:
            yield self.weights

    def plan_for(self, compute_capability: str) -> PlanFile:
        """Returns the plan for a GPU. Raises EngineError that lists the existing plans."""
        for plan in self.files:
            if plan.compute_capability == compute_capability:
                return plan
        there = ", ".join(plan.compute_capability for plan in self.files)
        raise EngineError(
            f"the engine has no plan for compute capability {compute_capability}, only for {there}; build it with "
            f"--compute_capability {compute_capability}"
        )

    def check_files(self, directory: Path) -> None:
        """Reads every file. Raises EngineError that names all files that are missing, damaged or different."""
        problems = []
        for stored in self.stored_files():
            try:
                stored.check(directory)
            except EngineError as error:
                problems.append(str(error))
        if problems:
            raise EngineError("; ".join(problems))


def plans_to_json(plans: TensorRtPlans) -> dict[str, Any]:
    """The `tensorrt` of config.json."""
    content = asdict(plans)
    files = content.pop("files")
    content["plans"] = [{"compute_capability": plan["compute_capability"], **plan["stored"]} for plan in files]
    return content


def plans_from_fields(source: JsonFields) -> TensorRtPlans:
    """Reads what plans_to_json() returned; notes problems in `source`."""
    weights = source.object("weights", optional=True)
    files = [PlanFile(item.string("compute_capability"), _stored_file(item)) for item in source.objects("plans")]
    profiles = source.strings("profiles")
    tensors = tuple(_tensor(item, len(profiles)) for item in source.objects("tensors"))
    capabilities = [plan.compute_capability for plan in files]
    if not files or len(set(capabilities)) != len(capabilities):
        source.problem("plans", "must be one for each compute capability, at least one")
    names = [stored.file for stored in (plan.stored for plan in files)]
    if len(set(names)) != len(names):
        source.problem("plans", "name a file twice")
    _check_tensors(source, tensors)
    return TensorRtPlans(
        package=source.string("package"),
        package_version=source.string("package_version"),
        plugin_version=source.string("plugin_version"),
        files=tuple(files),
        weights=None if weights is None else _stored_file(weights),
        profiles=profiles,
        tensors=tensors,
    )


def _stored_file(source: JsonFields) -> StoredFile:
    name = source.string("file")
    # Reads nothing outside of the directory, whatever the config says.
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        source.problem("file", "must be the name of a file in the engine directory")
    return StoredFile(name, source.integer("num_bytes", maximum=(1 << 63) - 1), source.string("checksum"))


def _tensor(source: JsonFields, num_profiles: int) -> TensorRow:
    shape = source.integers("shape", minimum=-1)
    dynamic = -1 in shape
    mode = source.string("mode", choices=(INPUT, OUTPUT))
    profiles = _profiles(source, shape)
    expected = num_profiles if dynamic and mode == INPUT else 0
    if len(profiles) != expected:
        source.problem("profiles", f"must be {expected}")
    return TensorRow(
        name=source.string("name"),
        dtype=source.string("dtype"),
        shape=shape,
        mode=mode,
        alias=source.optional_string("alias"),
        profiles=profiles,
    )


def _profiles(source: JsonFields, shape: tuple[int, ...]) -> tuple[Shapes, ...]:
    """Reads shapes that fit the tensor's shape and ascend; returns () after a problem."""
    data = source.raw("profiles")
    found = []
    for profile in data if isinstance(data, list) else ():
        rows = [tuple(row) for row in profile] if _is_table(profile, len(shape)) else []
        if len(rows) != 3 or not all(
            0 <= low <= usual <= high and size in (-1, low) and (size == -1 or low == high)
            for size, low, usual, high in zip(shape, *rows, strict=True)
        ):
            source.problem("profiles", "must have the smallest, usual and largest shape of each profile")
            return ()
        found.append((rows[0], rows[1], rows[2]))
    if not isinstance(data, list):
        source.problem("profiles", "must be a list")
    return tuple(found)


def _is_table(value: object, width: int) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == width
        and all(isinstance(size, int) and not isinstance(size, bool) for size in row)
        for row in value
    )


def _check_tensors(source: JsonFields, tensors: tuple[TensorRow, ...]) -> None:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        source.problem("tensors", "use a name twice")
    inputs = {tensor.name: tensor for tensor in tensors if tensor.mode == INPUT}
    for tensor in tensors:
        if tensor.alias is None:
            continue
        aliased = inputs.get(tensor.alias)
        if tensor.mode != OUTPUT or aliased is None or (aliased.dtype, aliased.shape) != (tensor.dtype, tensor.shape):
            source.problem("tensors", f"say that {tensor.name} is written over {tensor.alias}, which does not fit")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    add_file(path, digest)
    return digest.hexdigest()
