"""Rows of new tokens in a file of their own next to an adapter, in the layout of vLLM's extra vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from ..._core import AdapterError
from ...common.safetensors_stream import SafetensorsReader
from .adapter import DTYPES, Array, NewEmbeddings
from .names import EMBEDDING, LM_HEAD
from .pickled import read_pickle
from .problems import join_problems
from .recognise import refuse_lfs_pointer

SAFETENSORS: Final = "new_embeddings.safetensors"
PICKLE: Final = "new_embeddings.bin"
_LONG_LORA: Final = "trainable_params.bin"
_MODULES: Final = {"input_embeddings": EMBEDDING, "output_embeddings": LM_HEAD}


def has_new_embeddings(directory: Path) -> bool:
    """True if the directory has such a file."""
    return (directory / SAFETENSORS).is_file() or (directory / PICKLE).is_file()


def read_new_embeddings(directory: Path) -> dict[str, NewEmbeddings]:
    """Reads the file's rows, by EMBEDDING and LM_HEAD; returns {} without a file.

    Raises AdapterError if the file cannot be used, or if the directory has LongLoRA's trainable_params.bin, which also
    holds norms of the model.
    """
    if (directory / _LONG_LORA).is_file():
        raise AdapterError(
            f"{directory / _LONG_LORA}: LongLoRA's trained embeddings and norms, but adapters have no norms; "
            "merge them into the base model"
        )
    path, tensors = directory / SAFETENSORS, dict[str, Array]()
    if path.is_file():
        refuse_lfs_pointer(path)
        reader = SafetensorsReader(path, AdapterError, in_memory=True)
        tensors = {name: reader.array(name) for name in reader.specs}
    elif (directory / PICKLE).is_file():
        path = directory / PICKLE
        refuse_lfs_pointer(path)
        tensors = read_pickle(path)
    else:
        return {}
    problems = [
        f"tensor '{name}' is unknown; accepted: {', '.join(_MODULES)}"
        for name in sorted(tensors)
        if name not in _MODULES
    ]
    for name in _MODULES:
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"has no tensor '{name}'")
        elif tensor.ndim != 2 or 0 in tensor.shape or tensor.dtype not in (*DTYPES, np.dtype(np.float64)):
            problems.append(f"tensor '{name}': is {tensor.dtype} {list(tensor.shape)}, expected [tokens, hidden size]")
        elif not np.isfinite(tensor.astype(np.float32)).all():
            problems.append(f"tensor '{name}': has NaN, or values beyond float32")
    if problems:
        raise AdapterError(f"{path}: " + join_problems(problems))
    return {module: NewEmbeddings(f"{path.name}: {name}", tensors[name]) for name, module in _MODULES.items()}
