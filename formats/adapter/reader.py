"""Adapter directories of every format that can be served."""

from __future__ import annotations

from pathlib import Path

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .adapter import Adapter, ModuleTensors
from .mlx_reader import read_mlx_adapter
from .names import ModuleKey, Role
from .peft_reader import read_peft_adapter
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

    modules: those of the model that the adapter is for, where it is known: they say what paths mean.
    max_rank: what modules are refused above, before their matrices are made; None: no limit.
    classifiers: whether those of classifiers are accepted; what is read is without their heads (classifier_head.py).

    Raises AdapterError: with one sentence for a kind that is not served, else with every field and tensor that cannot
    be used, and why.
    """
    kind, fields = recognise(directory, modules, classifiers=classifiers)
    read = read_mlx_adapter if kind is AdapterFormat.MLX else read_peft_adapter
    adapter = read(directory, fields, modules, max_rank)
    problems = [problem for key, tensors in adapter.modules.items() for problem in _uneven_parts(key, tensors)]
    if not adapter.modules and not adapter.token_rows and not adapter.whole_weights:
        problems.append("changes no module")
    if problems:
        raise AdapterError(f"{adapter.file}: " + "; ".join(problems))
    return adapter


def read_initial_adapter(directory: Path, given: Path | None, modules: AdaptedModules | None) -> Adapter | None:
    """The adapter in `directory` as it was when its training began.

    given: its directory; None: the one within `directory` (INITIAL_DIRECTORY), if there is one.

    Raises AdapterError as read_adapter().
    """
    beside = directory / INITIAL_DIRECTORY
    if given is None and not beside.is_dir():
        return None
    return read_adapter(given or beside, modules)


def _uneven_parts(key: ModuleKey, tensors: ModuleTensors) -> list[str]:
    """Of a fused layer whose parts are cut out of its outputs."""
    outputs = len(tensors.b)
    if key.rows or key.is_in_order or outputs % len(key.source_parts) == 0:
        return []
    parts = len(key.source_parts)
    return [f"tensor '{tensors.names[Role.B]}': has {outputs} outputs, which are not {parts} equal parts"]
