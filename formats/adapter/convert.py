"""Converts an adapter directory to a request's tensors: weights [1, rows, width] and config [1, rows, 4]."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..._core import (
    AdapterError,
    DType,
    dtype_from_name,
    dtype_name,
    scale_elements,
)
from ...common.parallel import in_threads
from ...common.pauses import may_pause
from ..network.adapter_limits import AdapterLimits
from ..network.adapter_sites import AdaptedModules
from .adapter import DTYPES, NUMPY_DTYPES, Adapter, Array, ModuleTensors
from .base_weights import BaseWeights, HuggingFaceBase, HuggingFaceModel
from .biases import leave_shifts_open, make_shifts
from .dora import check_against_base, normalized_magnitude, write_files
from .heads import split_layers_of_heads
from .initial import initial_from_base, over_the_unchanged_base
from .names import MODULES, ModuleKey, Role
from .new_tokens import KEY, take_new_tokens
from .one_version import one_version
from .problems import join_problems
from .reader import read_adapter, read_initial_adapter
from .terms import AdapterTerms, rotary_factor_of, settings_of, terms_of
from .token_rows import add_token_rows
from .vocabulary import in_slices
from .whole_weights import add_whole_weights

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"

MAGNITUDE: Final = 1
SHIFT: Final = 2
"""Flags of the vectors that a row has."""
_SAME_MAGNITUDE: Final = 2.0**-8
"""Maximum difference from one of a DoRA magnitude that changes nothing: bfloat16's rounding of the base's norms."""


@dataclass(frozen=True)
class ConvertedAdapter:
    """An adapter in TensorRT-LLM's form, ready for LoraConfig(task_id, weights, config)."""

    # [1, rows, width] in the storage type. A row is A[rank, in], scale * B[out, rank], with DoRA magnitude[out], then
    # shift[out] if it has one, each flattened, then zeros up to the widest row.
    weights: npt.NDArray[Any]
    # int32 [1, rows, 4]: module_id, layer, rank, vectors (MAGNITUDE, SHIFT). By layer, then by module id; settings
    # (terms.py) come last.
    config: npt.NDArray[np.int32]
    # For each row: the module's path in the Hugging Face model, or the name of a setting.
    paths: tuple[str, ...]
    # aLoRA: the token ids from which on the adapter is active. () for other adapters.
    invocation_tokens: tuple[int, ...] = ()
    # True if rows come from trained or new tokens or from whole weights, which replace the base's.
    replaces_base: bool = False
    # True if all answers would be the base model's: in each row, A or B is zero, the magnitudes are one (DoRA: within
    # bfloat16's rounding), and the shifts are zero.
    changes_nothing: bool = False
    # Adapter.short_kind.
    kind: str = "lora"

    @property
    def terms(self) -> AdapterTerms:
        """Conditions that the adapter sets for requests that use it."""
        return terms_of(self.config[0])

    def save(self, directory: Path) -> None:
        """Writes model.lora_weights.npy and model.lora_config.npy; numpy shows bfloat16 as 'V2'."""
        files = {}
        for name, array in ((WEIGHTS_FILE, self.weights), (CONFIG_FILE, self.config)):
            buffer = io.BytesIO()
            np.save(buffer, array)
            files[name] = buffer.getvalue()
        write_files(directory, files)


def convert_adapter(
    directory: str | Path,
    *,
    storage_dtype: DType | str,
    base: BaseWeights | str | Path | None = None,
    initial_adapter: str | Path | None = None,
    modules: AdaptedModules | None = None,
    magnitudes_normalized: bool = False,
    limits: AdapterLimits | None = None,
    values_left_open: bool = False,
    classifiers: bool = False,
) -> ConvertedAdapter:
    """Converts the PEFT or MLX-LM adapter in `directory`; writes nothing.

    The scale is multiplied into B in float32, before the cast to `storage_dtype`. For PEFT's LoRA it is lora_alpha / r,
    or lora_alpha / sqrt(r) with use_rslora, after rank_pattern and alpha_pattern.

    base: the model that the adapter was trained on: a Hugging Face directory or a source of its weights. Shapes are
        compared with it, and it normalises DoRA magnitudes that are not normalised yet.
    initial_adapter: directory of the adapter in the state in which its training began. Adapters whose initialisation
        changed the base need it (PiSSA, OLoRA, CorDA, LoRA-GA). None: `initial_adapter` within the adapter's directory,
        if it exists. Without either, PiSSA's and OLoRA's are computed if `base` is a directory; this factorises each
        weight, which is slow for large models.
    modules: modules of the model that will serve the adapter, which resolve paths and give expected sizes; None: the
        model is not known.
    magnitudes_normalized: True if the caller knows that magnitudes are normalised, although the file has no mark.
    limits: limits of the engine that will serve the adapter; None: no limits.
    values_left_open: True neither computes nor compares values that depend on a missing base: shifts that depend on its
        biases are zero. For callers that read only sizes.
    classifiers: as for read_adapter().

    Raises AdapterError that names every tensor and field that cannot be used, or if the files change meanwhile;
    CheckpointError for a base that cannot be read; ConfigError for an unknown storage_dtype.
    """
    dtype = dtype_from_name(storage_dtype) if isinstance(storage_dtype, str) else storage_dtype
    limits = AdapterLimits() if limits is None else limits
    max_rank = limits.max_rank
    model = HuggingFaceModel(Path(base)) if isinstance(base, str | Path) else None
    known = modules or (None if model is None else model.modules)
    given = None if initial_adapter is None else Path(initial_adapter)
    with one_version(Path(directory)):
        adapter = read_adapter(Path(directory), known, max_rank=max_rank, classifiers=classifiers)
        initial = read_initial_adapter(Path(directory), given, known)
    new_tokens = take_new_tokens(adapter, known, limits.max_extra_tokens)
    rotary_factor = rotary_factor_of(adapter, known, limits.rotary_factors)
    if modules is not None:
        _check_sizes(adapter, modules)
    if isinstance(base, str | Path):
        assert model is not None
        base = HuggingFaceBase(model, model.modules, fan_in_fan_out=adapter.fan_in_fan_out)
        check_against_base(adapter, base)
        initial = initial or initial_from_base(adapter, base)
    elif base is not None:
        check_against_base(adapter, base)
    over_the_unchanged_base(adapter, initial)
    add_whole_weights(adapter, base, known, dtype, max_rank, left_open=values_left_open)
    add_token_rows(adapter, base, known, max_rank, left_open=values_left_open)
    if not adapter.modules and new_tokens is None:
        raise AdapterError(f"{adapter.file}: changes no module: its weights equal the base's")
    if adapter.is_dora and not (adapter.magnitudes_normalized or magnitudes_normalized):
        if base is None:
            raise AdapterError(
                f"{adapter.file}: its DoRA magnitudes are not marked as normalised by the base model; "
                "run adaptrt normalize-dora first, or give hf-lora-convert --base_model MODEL, or --dora_magnitudes "
                "normalized if they are normalised"
            )
        for key, tensors in adapter.modules.items():
            if tensors.magnitude is not None:
                tensors.magnitude = normalized_magnitude(adapter.file, key, tensors, base)
    if base is None and values_left_open:
        leave_shifts_open(adapter)
    else:
        make_shifts(adapter, base)
    split_layers_of_heads(adapter, known)
    if new_tokens is not None:
        adapter.modules[KEY] = new_tokens
    terms = AdapterTerms(-adapter.absent_tokens if new_tokens is None else new_tokens.rank, rotary_factor)
    return _flatten(adapter, known, dtype, settings_of(terms))


def _check_sizes(adapter: Adapter, modules: AdaptedModules) -> None:
    problems = []
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in modules.by_path))
    for key, tensors in adapter.modules.items():
        expected = modules.sizes_of(key.layer, key.module.name)
        if (found := modules.find(key.path)) is not None and found.is_of_vocabulary:
            expected = found.in_size, found.out_size
        sizes = (tensors.a.shape[1], tensors.b.shape[0])
        is_fusion = len(key.module.parts) > 1
        if key.layer >= modules.num_layers and not key.module.is_norm:
            problems.append(f"module '{key.path}': the model has {modules.num_layers} layers")
        elif expected is None or (modules.find(key.path) is None and not is_fusion):
            problems.append(f"module '{key.path}' does not exist in the model, which has {known}")
        elif sizes != expected:
            problems.append(
                f"module '{key.path}': lora_A {list(tensors.a.shape)} and lora_B {list(tensors.b.shape)} "
                f"have (in, out) = {sizes}, but {key.module.name} has {expected} in the model"
            )
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))


def _flatten(
    adapter: Adapter, modules: AdaptedModules | None, dtype: DType, settings: Mapping[str, int]
) -> ConvertedAdapter:
    """settings: the number of each setting, by name of its module."""
    sliced = sorted((piece for item in adapter.modules.items() for piece in in_slices(*item)), key=lambda item: item[0])
    rows = [_Row(list(found), modules) for _, found in groupby(sliced, key=lambda item: item[0].row)]
    weights = np.zeros((1, len(rows) + len(settings), max(row.size for row in rows)), NUMPY_DTYPES[dtype])

    def write(number: int) -> list[str]:
        problems: list[str] = []
        rows[number].write(weights[0, number], dtype, problems)
        may_pause()
        return problems

    problems = [problem for found in in_threads(write, range(len(rows))) for problem in found]
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))
    config = [(row.key.module_id, row.key.layer, row.rank, row.vectors) for row in rows]
    config += [(MODULES[name].id, 0, number, 0) for name, number in settings.items()]
    return ConvertedAdapter(
        weights,
        np.array([config], np.int32),
        (*(row.path for row in rows), *settings),
        adapter.invocation_tokens,
        bool(adapter.token_rows or adapter.whole_weights or KEY in adapter.modules),
        KEY not in adapter.modules
        and not adapter.changes_elsewhere
        and not settings
        and not any(row.changes(place, adapter.is_dora) for place, row in zip(weights[0], rows, strict=False)),
        adapter.short_kind,
    )


class _Row:
    """A module of a layer. For experts: A of all experts, then B, then the magnitudes, then the shifts.

    An expert that the adapter leaves out has zeros, and magnitudes of one. Smaller ranks are padded with zeros.
    """

    def __init__(self, found: list[tuple[ModuleKey, ModuleTensors]], modules: AdaptedModules | None) -> None:
        self.key, first = found[0]
        self._of_expert = {key.expert: (key, tensors) for key, tensors in found}
        self._experts: int = 1 if modules is None else modules.num_experts(self.key.layer, self.key.module.name)
        self._sizes: tuple[int, int] = (first.a.shape[1], first.b.shape[0])
        self.rank: Final = max(tensors.rank for _, tensors in found)
        self._has_magnitude = first.magnitude is not None
        self._has_shift = any(tensors.shift is not None for _, tensors in found)
        self.path: Final = self.key.path.rpartition(f".{self.key.expert}.")[0] if self._experts > 1 else self.key.path

    @property
    def size(self) -> int:
        """Number of elements of the row."""
        in_size, out_size = self._sizes
        return self._experts * (self.rank * (in_size + out_size) + out_size * (self._has_magnitude + self._has_shift))

    @property
    def vectors(self) -> int:
        """Flags of the vectors that the row has."""
        return MAGNITUDE * self._has_magnitude + SHIFT * self._has_shift

    def write(self, row: npt.NDArray[Any], dtype: DType, problems: list[str]) -> None:
        """Writes A, scaled B and the vectors, with outputs in the module's order."""
        a, b, magnitudes, shifts = self._split(row)
        magnitudes[:] = 1
        for expert, (key, tensors) in self._of_expert.items():
            places = {Role.A: a[expert, : tensors.rank], Role.B: b[expert, :, : tensors.rank]}
            if self._has_magnitude:
                places[Role.MAGNITUDE] = magnitudes[expert]
            if self._has_shift:
                places[Role.SHIFT] = shifts[expert]
            for role, values in tensors.parts():
                _write(places[role], key, role, values, tensors, dtype, problems)

    def changes(self, row: npt.NDArray[Any], is_dora: bool) -> bool:
        """True if a written row changes the module's outputs. B A counts as zero if no rank has both A and B."""
        a, b, magnitudes, shifts = self._split(row)
        has_product = bool((a.any(axis=2) & b.any(axis=1)).any())
        tolerance = _SAME_MAGNITUDE if is_dora else 0.0
        is_scaled = bool((np.abs(magnitudes.astype(np.float32) - 1) > tolerance).any())
        return has_product or is_scaled or bool(shifts.any())

    def _split(self, row: npt.NDArray[Any]) -> tuple[Array, Array, Array, Array]:
        """Returns views: A [experts, rank, in], B [experts, out, rank], magnitudes and shifts [experts, out or 0]."""
        (in_size, out_size), experts = self._sizes, self._experts
        shapes = [
            (experts, self.rank, in_size),
            (experts, out_size, self.rank),
            (experts, out_size * self._has_magnitude),
            (experts, out_size * self._has_shift),
        ]
        parts = np.split(row, np.cumsum([math.prod(shape) for shape in shapes]))
        a, b, magnitudes, shifts = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=False))
        return a, b, magnitudes, shifts


def _write(
    place: npt.NDArray[Any],
    key: ModuleKey,
    role: Role,
    values: Array,
    tensors: ModuleTensors,
    dtype: DType,
    problems: list[str],
) -> None:
    """Writes one matrix; `place` may be a view of a larger one."""
    is_contiguous = place.flags.c_contiguous
    written = place.reshape(-1) if is_contiguous else np.empty(values.size, place.dtype)
    factor = _as_float32(tensors.scale) if role is Role.B else 1.0
    first = 0
    is_finite = True
    for piece in _in_order(key, role, values):
        place_of_piece = written[first : first + piece.size]
        is_finite &= scale_elements(place_of_piece, dtype, piece, DTYPES[piece.dtype], factor)
        first += piece.size
    if not is_finite:
        problems.append(f"tensor '{tensors.names[role]}'" + _why_not_finite(values, role, tensors.scale, dtype))
    if not is_contiguous:
        place[...] = written.reshape(place.shape)


def _in_order(key: ModuleKey, role: Role, values: Array) -> tuple[Array, ...]:
    """Returns a tensor in pieces, in the order in which the row has them."""
    if role is Role.A:
        return (values,)
    return tuple(values[rows.start : rows.stop] for rows in key.rows_of(len(values)))


def _why_not_finite(values: Array, role: Role, scale: float, dtype: DType) -> str:
    wide = values.astype(np.float32)
    scaled = ""
    if role is Role.B:
        scaled = f", multiplied by its scale {scale:g},"
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is what this looks for
            wide = wide * np.float32(scale)
    if not np.isfinite(wide).all():
        return f"{scaled} goes beyond float32"
    return f"{scaled} goes up to {np.abs(wide).max():g}, beyond {dtype_name(dtype)}; store it as bfloat16 or float32"


def _as_float32(scale: float) -> float:
    with np.errstate(over="ignore"):  # reported where the tensor is named
        return float(np.float32(scale))
