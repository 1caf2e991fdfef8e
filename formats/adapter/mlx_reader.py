"""Reads MLX-LM adapters: y = W x + scale (x lora_a) lora_b.

With DoRA, y is multiplied by m / ||W + scale (lora_a lora_b)^T||. adapter_config.json holds all training settings; only
lora_parameters, fine_tune_type and num_layers say what the adapter computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..._core import AdapterError
from ...common.json_fields import JsonFields, describe
from ...common.safetensors_stream import SafetensorsReader
from ..network.adapter_sites import AdaptedModules
from .adapter import MAGNITUDES_KEY, MAGNITUDES_NORMALIZED, Adapter, ModuleTensors
from .module_parts import ModuleParts, PartsLayout, parts_by_module, ranks_above
from .names import ModuleKey, Role
from .problems import join_problems
from .recognise import CONFIG_FILE, MLX_FILE, refuse_lfs_pointer

LORA: Final = "lora"
DORA: Final = "dora"

_SHAPES: Final = {"lora_a": ("in", "rank"), "lora_b": ("rank", "out"), "m": ("out",)}
_LAYOUT: Final = PartsLayout(
    # MLX-LM always calls the model around the decoder `model`.
    re.compile(r"(?:(?:language_model\.)?model\.)?(?P<path>.+?)\.(?P<role>lora_a|lora_b|m)(?P<adapter>)"),
    _SHAPES,
    (frozenset(("lora_a", "lora_b")), frozenset(_SHAPES)),
)


@dataclass(frozen=True)
class _Config:
    is_dora: bool
    rank: int
    scale: float
    keys: tuple[str, ...] | None
    """Paths of modules within a layer, or within the model; None: all linear layers."""
    num_layers: int
    """Number of adapted layers, counted from the last; 0: all."""

    def targets(self, key: ModuleKey, layers_of_model: int | None) -> bool:
        """True if MLX-LM would put an adapter on a module."""
        _, _, within = key.path.partition(f".{key.layer}.")
        if self.keys is not None and not {within, key.path, f"model.{key.path}"} & set(self.keys):
            return False
        return layers_of_model is None or self.num_layers == 0 or key.layer >= layers_of_model - self.num_layers


def read_mlx_adapter(
    directory: Path, fields: Mapping[str, Any], modules: AdaptedModules | None, max_rank: int | None
) -> Adapter:
    """Reads adapters.safetensors according to the fields of adapter_config.json.

    modules, max_rank: as for read_adapter().

    Raises AdapterError that names every field and tensor that cannot be used, and why.
    """
    config = _parse(fields, directory / CONFIG_FILE)
    file = directory / MLX_FILE
    if not file.is_file():
        raise AdapterError(f"{directory}: has no {MLX_FILE}, the weights of an MLX-LM adapter")
    refuse_lfs_pointer(file)
    reader = SafetensorsReader(file, AdapterError, in_memory=True)
    tensors = {name: reader.array(name) for name in reader.specs}
    found, problems = parts_by_module(tensors, _LAYOUT, modules)
    problems = problems or (
        _disagreements(found, config, modules) or ranks_above(max_rank, dict.fromkeys(found, config.rank))
    )
    state = reader.metadata.get(MAGNITUDES_KEY)
    if state not in (None, MAGNITUDES_NORMALIZED):
        problems.append(f"metadata {MAGNITUDES_KEY} = '{state}'; accepted: {MAGNITUDES_NORMALIZED}")
    if problems:
        raise AdapterError(f"{file}: " + join_problems(problems))
    return Adapter(
        directory,
        file,
        "DoRA of MLX-LM" if config.is_dora else "LoRA of MLX-LM",
        {key: _module(parts, config) for key, parts in found.items()},
        tensors,
        is_dora=config.is_dora,
        magnitudes_normalized=state == MAGNITUDES_NORMALIZED,
    )


def _parse(fields: Mapping[str, Any], path: Path) -> _Config:
    kind = fields.get("fine_tune_type", DORA if fields.get("use_dora") is True else LORA)
    if kind == "full":
        raise AdapterError(f'{path}: fine_tune_type = "full": a whole model was trained; fuse it and convert the model')
    if kind not in (LORA, DORA):
        raise AdapterError(f"{path}: fine_tune_type = {describe(kind)}: accepted: {LORA}, {DORA}")
    reader = JsonFields(fields)
    # The name of the field before MLX-LM 0.20. -1 stands for all layers.
    count = "lora_layers" if "num_layers" not in reader and "lora_layers" in reader else "num_layers"
    num_layers = reader.integer(count, minimum=-1)
    parameters = reader.object("lora_parameters")
    config = _Config(kind == DORA, 1, 1.0, None, max(num_layers, 0))
    if parameters is not None:
        rank = parameters.integer("rank")
        scale = parameters.number("scale", minimum=-np.inf)
        alpha = parameters.raw("alpha")
        parameters.discard(("dropout",))
        if alpha is not None and alpha != rank:
            parameters.problem(
                "alpha",
                f"is {describe(alpha)}: old releases of MLX-LM multiplied scale by alpha / rank, newer ones ignore it; "
                "set scale to the factor that the adapter was trained with, and remove alpha",
            )
        keys = parameters.strings("keys") if parameters.raw("keys") is not None else None
        parameters.refuse_remaining()
        config = _Config(kind == DORA, rank, scale, keys, max(num_layers, 0))
    if reader.problems:
        raise AdapterError(f"{path}: " + "; ".join(reader.problems))
    return config


def _disagreements(
    found: Mapping[ModuleKey, ModuleParts], config: _Config, modules: AdaptedModules | None
) -> list[str]:
    """Lists tensors that MLX-LM would not use as the file has them."""
    problems = []
    layers = None if modules is None else modules.num_layers
    for key, parts in found.items():
        if not config.targets(key, layers):
            problems.append(
                f"module '{key.path}' has tensors, but adapter_config.json's keys and num_layers leave it out"
            )
        if parts.sizes["rank"] != config.rank:
            problems.append(
                f"module '{key.path}': the rank is {parts.sizes['rank']} in lora_a, but {config.rank} by "
                "adapter_config.json"
            )
        if config.is_dora != ("m" in parts.names):
            there = "no m" if config.is_dora else "m, the magnitudes of DoRA"
            kind = DORA if config.is_dora else LORA
            problems.append(f"module '{key.path}' has {there}, but adapter_config.json says {kind}")
    return problems


def _module(parts: ModuleParts, config: _Config) -> ModuleTensors:
    names = {Role.A: parts.names["lora_a"], Role.B: parts.names["lora_b"]}
    if "m" in parts.names:
        names[Role.MAGNITUDE] = parts.names["m"]
    return ModuleTensors(
        np.ascontiguousarray(parts.arrays["lora_a"].T),
        np.ascontiguousarray(parts.arrays["lora_b"].T),
        parts.arrays.get("m"),
        config.scale,
        names,
    )
