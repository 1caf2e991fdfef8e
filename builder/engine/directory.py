"""Writes an engine directory: compiles a checkpoint and copies the accompanying files."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..._core import dtype_name
from ...common.output_directory import producer_of
from ...common.progress import Progress
from ...formats.checkpoint.config import CONFIG_FILE, PRODUCER
from ...formats.checkpoint.rank_tensors import RankTensors
from ...formats.engine.build_config import BuildConfig
from ...formats.engine.engine_config import ADAPTERS_DIRECTORY, VISION_DIRECTORY, EngineConfig, engine_file
from ...formats.engine.tensorrt.plan_config import TensorRtPlans
from ...formats.engine.weight_usage import USAGE_FILE
from ...formats.network.network import Network
from ...formats.template_files import holds_templates
from ..compile.native import CompiledNetwork, compile_network
from ..compile.tensorrt.compiled_plans import WEIGHTS_FILE, CompiledPlans, plan_file
from ..conversion.checkpoint import Checkpoint
from ..conversion.convert import COPIED_FILES, copy_files
from ..conversion.sparse_predictors import SparsePredictors
from .carried_adapters import copy_adapters
from .options import CompilerOptions
from .vision import Tower


@dataclass(frozen=True)
class WrittenEngine:
    """An engine directory and facts about its compilation."""

    config: EngineConfig
    engine_bytes: int
    """Size of the engine file, or of the plans and their weights."""
    compiled: CompiledNetwork | CompiledPlans
    """Output of the backend's compiler; with several ranks, rank 0's."""


def write_engine(
    checkpoint: Checkpoint,
    config: BuildConfig,
    options: CompilerOptions,
    directory: Path,
    progress: Progress,
    tower: Tower | None = None,
) -> WrittenEngine:
    """Fills an empty directory. `config` comes from checked_config(). tower: the vision tower, if the model has one.

    Raises EngineError, OSError, and CheckpointError for sparse predictors that do not fit.
    """
    plans = None
    if options.needs_graph:
        # Imported here because it imports onnx, which native engines do not need.
        from .graph import compile_graph

        plans = compile_graph(checkpoint, config, options, directory, progress)
    compiled: CompiledNetwork | CompiledPlans
    engine: tuple[str, ...] | TensorRtPlans
    if plans is not None:
        compiled, engine, engine_bytes = plans, plans.plans, plans.plans.num_bytes
    else:
        predictors = None
        if config.sparse_predictors is not None:
            predictors = SparsePredictors.open(config.sparse_predictors, checkpoint.network)
        networks = [_compile_native(checkpoint, config, predictors, rank) for rank in range(len(checkpoint.ranks))]
        engine = _write_native(networks, options.workers, directory, progress)
        compiled = networks[0]
        engine_bytes = sum((directory / engine_file(rank)).stat().st_size for rank in range(len(networks)))
    if tower is not None:
        tower.write(directory / VISION_DIRECTORY, config, progress)
    copy_files(checkpoint.directory, directory)
    stored, adapter_checksums = copy_adapters(config, directory)
    if stored.sparse_predictors is not None:
        stored = replace(stored, sparse_predictors=Path(stored.sparse_predictors.absolute().name))
    written = EngineConfig.of_this_release(checkpoint.config, stored, engine, adapter_checksums, checkpoint.origin)
    written.save(directory)
    return WrittenEngine(written, engine_bytes, compiled)


def is_engine_directory(directory: Path) -> bool:
    """True if a directory holds only files that write_engine() writes, so that it may be replaced."""
    if producer_of(directory / CONFIG_FILE) != PRODUCER:
        return False
    engine_files = (engine_file("*"), plan_file("*"), WEIGHTS_FILE)
    known = (CONFIG_FILE, USAGE_FILE, ADAPTERS_DIRECTORY, VISION_DIRECTORY, *COPIED_FILES, *engine_files)
    entries = [entry for entry in directory.iterdir() if not holds_templates(entry)]
    names = [entry.name for entry in entries if not entry.is_symlink()]
    return (
        len(names) == len(entries)
        and all(any(fnmatch.fnmatchcase(name, pattern) for pattern in known) for name in names)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in engine_files for name in names)
    )


def _write_native(
    networks: Sequence[CompiledNetwork], workers: int, directory: Path, progress: Progress
) -> tuple[str, ...]:
    """Packs the weights into one file per rank, `workers` files at a time. Returns the files' checksums."""
    with (
        progress.task("Packing", sum(network.num_bytes for network in networks)) as advance,
        ThreadPoolExecutor(min(workers, len(networks))) as pool,
    ):
        written = [
            pool.submit(network.write, directory / engine_file(rank), advance) for rank, network in enumerate(networks)
        ]
        return tuple(file.result() for file in written)


def _compile_native(
    checkpoint: Checkpoint, config: BuildConfig, predictors: SparsePredictors | None, rank: int
) -> CompiledNetwork:
    network: Network = checkpoint.network
    tensors: RankTensors = checkpoint.ranks[rank]
    if predictors is not None:
        network = predictors.added_to(network)
        tensors = predictors.tensors_beside(tensors, np.dtype(dtype_name(checkpoint.config.dtype)))
    return compile_network(network, tensors, config, rank)
