"""Who starts the processes of an engine of several ranks: what ExecutorConfig.parallel_config says of it."""

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
    """How this process is to start its workers; None where MPI starts the processes, if there are several."""
    parallel = config.parallel_config if isinstance(config, ExecutorConfig) else None
    if not isinstance(parallel, ParallelConfig) or parallel.communication_mode is not CommunicationMode.ORCHESTRATOR:
        return None
    return parallel.orchestrator_config or OrchestratorConfig()


def without_parallel_config(config: ExecutorConfig) -> tuple[ExecutorConfig, list[str]]:
    """A configuration as C++ takes it, and what its parallel_config says that cannot be done."""
    parallel = config.parallel_config
    if not isinstance(parallel, ParallelConfig):
        return config, []
    changed = copy.copy(config)
    changed.parallel_config = None
    problems = [
        f"parallel_config.{name} is {getattr(parallel, name)!r}; accepted: None"
        for name in ("device_ids", "participant_ids", "num_nodes")
        if getattr(parallel, name) is not None
    ]
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
    """Raises ConfigError for an engine that is not run by workers."""
    mode = "ExecutorConfig: parallel_config.communication_mode is ORCHESTRATOR"
    if engine.num_ranks == 1:
        raise ConfigError(
            f"{mode}, and {engine.directory} is an engine of one rank, which runs in this process; accepted: LEADER"
        )
    if engine.rank > 0:
        raise ConfigError(f"{mode}, and this is rank {engine.rank} of those that MPI has started; accepted: LEADER")


def num_ranks_at(directory: Path) -> int:
    """Of the engine in a directory; 1 where there is none, such as a model's or one of another machine."""
    if producer_of(directory / CONFIG_FILE) != PRODUCER:
        return 1
    return EngineConfig.load(directory).pretrained_config.mapping.world_size


def with_workers(config: ExecutorConfig | None, engine: LoadedEngine) -> ExecutorConfig | None:
    """A configuration whose executor starts the workers itself, where it does not say who does and MPI has not.

    For what has no other word on it, such as LLM and commands. The caller's is left as it is.
    """
    if engine.num_ranks == 1 or is_started_by_mpi() or (config is not None and config.parallel_config is not None):
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    changed.parallel_config = ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR)
    return changed
