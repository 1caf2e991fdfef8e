"""Decides who starts the processes of an engine of several ranks, from ExecutorConfig.parallel_config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ..._core import ConfigError, ExecutorConfig
from ...common.output_directory import producer_of
from ...formats.checkpoint.config import CONFIG_FILE, PRODUCER
from ...formats.engine.engine_config import EngineConfig
from ..loaded_engine import LoadedEngine
from ..options.parallel import CommunicationMode, OrchestratorConfig, ParallelConfig
from ..ranks import is_started_by_mpi


def orchestrator_of(config: Any) -> OrchestratorConfig | None:
    """Returns how this process starts its workers; None: MPI starts the processes, or there is only one."""
    parallel = config.parallel_config if isinstance(config, ExecutorConfig) else None
    if not isinstance(parallel, ParallelConfig) or parallel.communication_mode is not CommunicationMode.ORCHESTRATOR:
        return None
    return parallel.orchestrator_config or OrchestratorConfig()


def device_of(config: Any) -> int | None:
    """Returns the number of the GPU in a checked configuration; None if it chooses none."""
    parallel = config.parallel_config if isinstance(config, ExecutorConfig) else None
    return parallel.device_ids[0] if isinstance(parallel, ParallelConfig) and parallel.device_ids else None


def without_parallel_config(config: ExecutorConfig) -> tuple[ExecutorConfig, list[str]]:
    """Returns the configuration for C++, and the problems of its parallel_config."""
    parallel = config.parallel_config
    if not isinstance(parallel, ParallelConfig):
        return config, []
    changed = copy.copy(config)
    changed.parallel_config = None
    problems = [
        f"parallel_config.{name} is {getattr(parallel, name)!r}; accepted: None"
        for name in ("participant_ids", "num_nodes")
        if getattr(parallel, name) is not None
    ]
    if parallel.device_ids is not None and len(parallel.device_ids) != 1:
        problems.append(f"parallel_config.device_ids is {parallel.device_ids}; accepted: None, or a list of one GPU")
    orchestrator = parallel.orchestrator_config
    if orchestrator is None:
        return changed, problems
    if parallel.communication_mode is CommunicationMode.LEADER:
        problems.append("parallel_config.orchestrator_config is given; accepted: None with LEADER")
    place = "parallel_config.orchestrator_config"
    if not orchestrator.is_orchestrator:
        problems.append(f"{place}.is_orchestrator is False; accepted: True, of the process that has the executor")
    if not orchestrator.spawn_processes:
        problems.append(f"{place}.spawn_processes is False; accepted: True, or LEADER with processes of mpirun")
    if orchestrator.orch_leader_comm is not None:
        problems.append(f"{place}.orch_leader_comm is {orchestrator.orch_leader_comm!r}; accepted: None")
    return changed, problems


def require_workers(engine: LoadedEngine) -> None:
    """Raises ConfigError for an engine that workers do not run."""
    mode = "ExecutorConfig: parallel_config.communication_mode is ORCHESTRATOR"
    if engine.num_ranks == 1:
        raise ConfigError(
            f"{mode}, and {engine.directory} is an engine of one rank, which runs in this process; accepted: LEADER"
        )
    if engine.rank > 0:
        raise ConfigError(f"{mode}, and this is rank {engine.rank} of those that MPI has started; accepted: LEADER")


def num_ranks_at(directory: Path) -> int:
    """Returns the number of ranks of the engine in a directory; 1 if there is no engine, for example in a model's
    directory.
    """
    if producer_of(directory / CONFIG_FILE) != PRODUCER:
        return 1
    return EngineConfig.load(directory).pretrained_config.mapping.world_size


def with_workers(config: ExecutorConfig | None, engine: LoadedEngine) -> ExecutorConfig | None:
    """Returns a configuration whose executor starts the workers itself, unless parallel_config is set or MPI started
    this process.

    For callers such as LLM and commands, which do not choose. Does not change the caller's configuration.
    """
    if engine.num_ranks == 1 or is_started_by_mpi() or (config is not None and config.parallel_config is not None):
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    changed.parallel_config = ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR)
    return changed
