"""Implements LoraConfig.from_peft: reads an adapter directory as the tensors of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import AdapterError, DType
from ..common.parallel import use_threads
from ..formats.adapter import ConvertedAdapter, Term, check_ranks, convert_adapter, weighted_sum
from ..formats.network.adapter_limits import AdapterLimits
from ..formats.sources import Source, find_adapter, find_sum
from ..formats.sources.base_model import warn_of_other_base
from ..formats.sources.sum_of_names import check_num_terms
from .engine import LoadedEngine, load_engine


def tensors_from_peft(
    directory: str | Path | Mapping[str | Path, float],
    engine: LoadedEngine | str | Path,
    magnitudes_normalized: bool,
    active_from: int | None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Returns weights and config of an adapter, or of a weighted sum, for this engine; see LoraConfig.from_peft."""
    loaded = engine if isinstance(engine, LoadedEngine) else load_engine(engine)
    if isinstance(directory, Mapping):
        converted = _sum_of_sources([(find_adapter(path), weight) for path, weight in directory.items()], loaded)
    elif (summed := find_sum(directory)) is not None:
        converted = _sum_of_sources(list(summed.items()), loaded)
    else:
        source = find_adapter(directory)
        warn_of_other_base(str(source), source.directory, loaded.config.source)
        converted = _converted(
            source.directory,
            loaded,
            loaded.lora.dtype,
            magnitudes_normalized=magnitudes_normalized,
        )
    if converted.invocation_tokens and active_from is None:
        raise AdapterError(
            f"{directory}: an aLoRA adapter, which acts from its invocation tokens "
            f"{list(converted.invocation_tokens)} on; give active_from, their position in the prompt, as "
            "invocation_start() finds it"
        )
    return converted.weights, converted.config


def _sum_of_sources(sources: Sequence[tuple[Source, float]], engine: LoadedEngine) -> ConvertedAdapter:
    """Returns a weighted sum of adapters. Warns of those that were trained over another base model."""
    for source, _ in sources:
        warn_of_other_base(str(source), source.directory, engine.config.source)
    return sum_of_directories([(str(source), source.directory, weight) for source, weight in sources], engine)


def adapter_of_directory(directory: Path, engine: LoadedEngine) -> ConvertedAdapter:
    """Reads the adapter in a directory; of a classifier's, everything but its head. Raises AdapterError."""
    return _converted(directory, engine, engine.lora.dtype, classifiers=True)


def sum_of_directories(terms: Sequence[tuple[str, Path, float]], engine: LoadedEngine) -> ConvertedAdapter:
    """Returns a weighted sum of adapters. terms: name for errors, directory and weight of each.

    Raises AdapterError for an invalid adapter or an invalid sum.
    """
    if not terms:
        raise AdapterError("a weighted sum of adapters has no terms")
    check_num_terms(len(terms))
    for name, _, weight in terms:
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise AdapterError(f"the weight of '{name}' is {weight!r}; expected a finite number")
    if engine.lora.sites:
        check_ranks([(name, directory) for name, directory, _ in terms], engine.adapted_modules, engine.lora.max_rank)
    converted = [Term(name, _converted(directory, engine, DType.FLOAT32), weight) for name, directory, weight in terms]
    return weighted_sum(converted, engine.adapted_modules, engine.lora.dtype, engine.lora.max_rank)


def _converted(
    directory: Path,
    engine: LoadedEngine,
    dtype: DType,
    *,
    magnitudes_normalized: bool = False,
    classifiers: bool = False,
) -> ConvertedAdapter:
    if not engine.lora.sites:
        raise AdapterError(
            f"{directory}: the engine {engine.directory} was built without LoRA; build it with --lora_plugin"
        )
    with use_threads(engine.num_load_threads):
        return convert_adapter(
            directory,
            storage_dtype=dtype,
            base=engine.base_weights(),
            modules=engine.adapted_modules,
            magnitudes_normalized=magnitudes_normalized,
            limits=AdapterLimits.of_layout(engine.lora),
            classifiers=classifiers,
        )
