"""Writes PEFT directories of random adapters for a Hugging Face Llama directory, for peers and for loading tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adaptrt import CheckpointError
from adaptrt.common.safetensors_stream import SafetensorsReader, SafetensorsWriter, TensorSpec

from .model import BenchModel

TARGET_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHA_PER_RANK: Final = 2
Array = npt.NDArray[Any]


def write_peft_adapter(model: BenchModel, base: Path, directory: Path, rank: int, seed: int, *, dora: bool) -> None:
    """Writes a bfloat16 adapter of all seven modules.

    `base` is a directory from write_model: DoRA's magnitudes depend on its weights.
    """
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": ALPHA_PER_RANK * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": dora,
        "target_modules": list(TARGET_MODULES),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    linears = [
        (name.removesuffix(".weight"), shape)
        for name, shape, _ in model.tensors()
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in TARGET_MODULES
    ]
    specs = []
    for path, (size_out, size_in) in linears:
        specs.append(_spec(f"{path}.lora_A.weight", (rank, size_in)))
        specs.append(_spec(f"{path}.lora_B.weight", (size_out, rank)))
        if dora:
            specs.append(_spec(f"{path}.lora_magnitude_vector", (size_out,)))
    generator = np.random.default_rng(seed)
    checkpoint = SafetensorsReader(base / "model.safetensors", CheckpointError) if dora else None
    with SafetensorsWriter(directory / "adapter_model.safetensors", specs, metadata={"format": "pt"}) as writer:
        for path, shape in linears:
            weight = None if checkpoint is None else checkpoint.array(f"{path}.weight").astype(np.float32)
            for spec, values in zip(_specs_of(specs, path), _values(generator, shape, rank, weight), strict=True):
                writer.write(spec.name, values.astype(ml_dtypes.bfloat16))


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(f"base_model.model.{name}", np.dtype(ml_dtypes.bfloat16), shape)


def _specs_of(specs: list[TensorSpec], path: str) -> list[TensorSpec]:
    return [spec for spec in specs if spec.name.startswith(f"base_model.model.{path}.lora_")]


def _values(generator: np.random.Generator, shape: tuple[int, ...], rank: int, weight: Array | None) -> Iterator[Array]:
    """Yields A, B, and, if the base's weight is given, DoRA's magnitude: the row norms after the update, with
    deviations of about five percent."""
    size_out, size_in = shape
    a = generator.standard_normal((rank, size_in), dtype=np.float32) * np.float32(size_in**-0.5)
    b = generator.standard_normal((size_out, rank), dtype=np.float32) * np.float32(0.05 * rank**-0.5)
    yield a
    yield b
    if weight is not None:
        norms = np.linalg.norm(weight + ALPHA_PER_RANK * (b @ a), axis=1)
        yield norms * (1 + np.float32(0.05) * generator.standard_normal(size_out, dtype=np.float32))
