"""Adapters as PEFT applies them, for comparison with the conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from adaptrt.formats.adapter import ConvertedAdapter

from .loading import load, load_adapter

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def base_weights(model_directory: Path) -> dict[str, np.ndarray]:
    """Returns the float32 weights of a Hugging Face directory by module path."""
    model = load(transformers.AutoModelForCausalLM, model_directory, dtype=torch.float32)
    return _weights(model)


def merged_by_peft(model_directory: Path, adapter_directory: Path) -> dict[str, np.ndarray]:
    """Returns the same weights after PEFT merged an adapter into them."""
    base = load(transformers.AutoModelForCausalLM, model_directory, dtype=torch.float32)
    return _weights(load_adapter(base, adapter_directory).merge_and_unload())


def _weights(model: Any) -> dict[str, np.ndarray]:
    return {
        name.removesuffix(".weight"): tensor.numpy().copy()
        for name, tensor in model.state_dict().items()
        if name.endswith(".weight") and tensor.dim() == 2
    }


def merged_by_us(base: dict[str, np.ndarray], adapter: ConvertedAdapter) -> dict[str, np.ndarray]:
    """Computes (W + B A) * magnitude from a converted adapter's rows."""
    merged = dict(base)
    for row, config, path in zip(adapter.weights[0], adapter.config[0], adapter.paths, strict=True):
        rank, is_dora = int(config[2]), bool(config[3])
        size_out, size_in = base[path].shape
        a, b, magnitude, padding = np.split(
            row.astype(np.float32), np.cumsum([rank * size_in, size_out * rank, size_out * is_dora])
        )
        assert not padding.any()
        merged[path] = base[path] + b.reshape(size_out, rank) @ a.reshape(rank, size_in)
        if is_dora:
            merged[path] *= magnitude[:, np.newaxis]
    return merged


def edit_config(directory: Path, **fields: Any) -> None:
    """Changes or adds fields of adapter_config.json."""
    path = directory / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(directory: Path, edit: Any, metadata: dict[str, str] | None = None) -> None:
    """Replaces an adapter's tensors by edit(tensors)."""
    save_file(edit(load_file(directory / TENSORS)), directory / TENSORS, metadata or {"format": "pt"})
