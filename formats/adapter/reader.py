"""Reads adapter directories of every served format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .adapter import Adapter, ModuleTensors
from .mlx_reader import read_mlx_adapter
from .names import ModuleKey, Role, module_at
from .peft_reader import read_peft_adapter
from .problems import join_problems
from .recognise import (
    INITIAL_DIRECTORY,
    AdapterFormat,
    recognise,
)


def read_adapter(
    directory: Path,
    modules: AdaptedModules | None = None,
    *,
    max_rank: int | None = None,
    classifiers: bool = False,
) -> Adapter:
    """Reads an adapter of PEFT or of MLX-LM.

    modules: modules of the model that the adapter is for, which resolve its paths; None: the model is not known.
    max_rank: modules of a higher rank are refused before their matrices are made; None: no limit.
    classifiers: True accepts adapters of classifiers; they are read without their heads (classifier_head.py).

    Raises AdapterError. For a kind that is not served the text is one sentence; otherwise it lists every field and
    tensor that cannot be used, and why.
    """
    kind, fields = recognise(directory, modules, classifiers=classifiers)
    read = read_mlx_adapter if kind is AdapterFormat.MLX else read_peft_adapter
    adapter = read(directory, fields, modules, max_rank)
    problems = [problem for key, tensors in adapter.modules.items() for problem in _uneven_parts(key, tensors)]
    if not adapter.modules and not adapter.token_rows and not adapter.whole_weights:
        if adapter.changes_elsewhere and modules is not None:
            adapter.modules.update([_zero_module(modules)])
        else:
            problems.append("changes no module")
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))
    return adapter


def read_initial_adapter(directory: Path, given: Path | None, modules: AdaptedModules | None) -> Adapter | None:
    """Reads the adapter in the state in which its training began.

    given: its directory; None: the subdirectory INITIAL_DIRECTORY of `directory`, if it exists.

    Returns None if there is none. Raises AdapterError for the reasons of read_adapter().
    """
    beside = directory / INITIAL_DIRECTORY
    if given is None and not beside.is_dir():
        return None
    return read_adapter(given or beside, modules)


def _uneven_parts(key: ModuleKey, tensors: ModuleTensors) -> list[str]:
    """Lists what is wrong with a fused layer whose parts are equal shares of its outputs."""
    outputs = len(tensors.b)
    if key.rows or key.is_in_order or outputs % len(key.source_parts) == 0:
        return []
    parts = len(key.source_parts)
    return [f"tensor '{tensors.names[Role.B]}': has {outputs} outputs; expected {parts} equal parts"]


def _zero_module(modules: AdaptedModules) -> tuple[ModuleKey, ModuleTensors]:
    """Returns a module whose matrices are zero, for an adapter that only another network uses: a row is required."""
    found = next(module for module in modules.by_path.values() if not module.is_of_vocabulary and module.expert == 0)
    key = module_at(found.path, modules)
    assert key is not None  # the path comes from `modules`
    a, b = np.zeros((1, found.in_size), np.float32), np.zeros((found.out_size, 1), np.float32)
    return key, ModuleTensors(a, b, None, 1.0, {})
