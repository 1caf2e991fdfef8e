"""DoRA (arXiv:2402.09353): magnitudes divided by the norms of the adapted weight, once, before serving.

PEFT computes y = m / ||W + s B A|| * (W x + s B A x) + bias, with the norm of each row of W + s B A. The norm does not
change while serving, so m' = m / ||W + s B A|| replaces m: one factor per output channel.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from ..._core import AdapterError
from ...common.json_fields import load_json_object
from .adapter import MAGNITUDES_KEY, MAGNITUDES_NORMALIZED, Adapter, FloatArray, ModuleTensors
from .base_weights import BaseWeights, HuggingFaceBase, HuggingFaceModel
from .initial import over_the_unchanged_base
from .mlx_reader import LORA
from .names import ModuleKey, Role
from .problems import join_problems
from .reader import read_adapter
from .recognise import CONFIG_FILE, MAX_CONFIG_BYTES, MLX_FILE, SAFETENSORS_FILE


def normalized_magnitude(file: Path, key: ModuleKey, tensors: ModuleTensors, base: BaseWeights) -> FloatArray:
    """Returns float32[out]: m / ||W + s B A|| of a module of `file`. `base` must have the module with the same shape.

    Raises AdapterError if a row's norm is zero or not finite.
    """
    if tensors.magnitude is None:
        raise ValueError(f"module '{key.path}' has no magnitude")
    norms = np.empty(len(tensors.magnitude), np.float64)
    first = 0
    with np.errstate(over="ignore", invalid="ignore"):  # checked below, where the tensor is named
        a, scaled_b = tensors.a.astype(np.float32), tensors.b.astype(np.float32) * np.float32(tensors.scale)
        for block in base.row_blocks(key):
            rows = slice(first, first + len(block))
            adapted = block + scaled_b[rows] @ a
            norms[rows] = np.sqrt(np.einsum("ij,ij->i", adapted, adapted, dtype=np.float64))
            first = rows.stop
    useless = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if useless.size:
        raise AdapterError(
            f"{file}: tensor '{tensors.names[Role.MAGNITUDE]}': row {useless[0]} of the adapted weight has the norm "
            f"{norms[useless[0]]}; expected a finite norm above 0"
        )
    return (tensors.magnitude.astype(np.float32) / norms).astype(np.float32)


def check_against_base(adapter: Adapter, base: BaseWeights) -> None:
    """Raises AdapterError that names every module whose shapes differ from the base's."""
    problems = []
    for key, tensors in adapter.modules.items():
        if key.module.is_norm:  # a norm has no weight with outputs; its bias is compared when it is read
            continue
        shape, expected = base.shape(key), (tensors.b.shape[0], tensors.a.shape[1])
        if shape is None:
            problems.append(f"module '{key.path}' does not exist in {base.describe()}")
        elif shape != expected:
            problems.append(
                f"module '{key.path}': lora_A {list(tensors.a.shape)} and lora_B {list(tensors.b.shape)} fit "
                f"a weight of {list(expected)}, but it is {list(shape)} in {base.describe()}"
            )
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))


def normalize_adapter(directory: Path, output: Path, base_directory: Path, *, strip: bool = False) -> Adapter:
    """Writes a DoRA adapter with normalised magnitudes to `output`, or as plain LoRA without magnitudes if `strip`.

    Magnitudes are written as float32 vectors under their original names, everything else unchanged, always as
    safetensors. The file is marked as normalised. Without magnitudes, adapter_config.json says LoRA.

    Returns the adapter that was read. Raises AdapterError or CheckpointError, and then leaves `output` unchanged.
    """
    model = HuggingFaceModel(base_directory)
    adapter = read_adapter(directory, model.modules)
    over_the_unchanged_base(adapter, None)
    if not adapter.is_dora:
        raise AdapterError(f"{adapter.file}: is not a DoRA adapter, so there are no magnitudes to normalise or strip")
    if adapter.magnitudes_normalized and not strip:
        raise AdapterError(f"{adapter.file}: the magnitudes are normalised already")
    if output.exists() and output.samefile(directory):
        raise AdapterError(f"{output}: is also the input; give another output directory")
    base = HuggingFaceBase(model, model.modules, fan_in_fan_out=adapter.fan_in_fan_out)
    check_against_base(adapter, base)

    tensors = dict(adapter.tensors)
    metadata = {"format": "pt"}
    config = (directory / CONFIG_FILE).read_bytes()
    if strip:
        config = _without_dora(
            load_json_object(directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES), adapter.file
        )
    else:
        metadata[MAGNITUDES_KEY] = MAGNITUDES_NORMALIZED
    for key, module in adapter.modules.items():
        if module.magnitude is None:
            continue
        name = module.names[Role.MAGNITUDE]
        if strip:
            del tensors[name]
        else:
            tensors[name] = normalized_magnitude(adapter.file, key, module, base)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    write_files(output, {CONFIG_FILE: config, _safetensors_of(adapter.file): save(contiguous, metadata)})
    return adapter


def _without_dora(fields: dict[str, Any], file: Path) -> bytes:
    """Returns an adapter_config.json of plain LoRA."""
    plain = {"fine_tune_type": LORA} if file.name == MLX_FILE else {"use_dora": False}
    return (json.dumps({**fields, **plain}, indent=2) + "\n").encode()


def _safetensors_of(file: Path) -> str:
    return MLX_FILE if file.name == MLX_FILE else SAFETENSORS_FILE


def write_files(directory: Path, contents: dict[str, bytes]) -> None:
    """Writes all of the files, or none if one cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
    try:
        for name, content in contents.items():
            (staging / name).write_bytes(content)
        for name in contents:
            (staging / name).replace(directory / name)
    finally:
        shutil.rmtree(staging)
