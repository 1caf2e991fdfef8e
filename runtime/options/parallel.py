"""How TensorRT-LLM's executors share a model among processes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

from .checked_fields import ANYTHING, BOOL, TEXT, CheckedFields, instance_of, integer, list_of, optional


class CommunicationType(enum.Enum):
    """How processes talk to each other."""

    MPI = 0


class CommunicationMode(enum.Enum):
    """Who starts the processes."""

    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(eq=False)
class OrchestratorConfig(CheckedFields):
    """How an orchestrator starts its workers.

    worker_executable_path is the Python that they run in, or a program that is called as one and becomes it; empty or
    None: this process's. Executors take the defaults of the rest.
    """

    is_orchestrator: Annotated[bool, BOOL] = True
    worker_executable_path: Annotated[str | None, optional(TEXT)] = ""
    orch_leader_comm: Annotated[Any, ANYTHING] = None
    spawn_processes: Annotated[bool, BOOL] = True


@dataclass(eq=False)
class ParallelConfig(CheckedFields):
    """ExecutorConfig.parallel_config. Executors take None for what has no meaning here.

    LEADER: mpirun has started as many processes as the engine has ranks, and each makes the executor. ORCHESTRATOR:
    this process has the executor, and starts as many workers, as orchestrator_config says (None: the default one).
    """

    communication_type: Annotated[CommunicationType, instance_of(CommunicationType)] = CommunicationType.MPI
    communication_mode: Annotated[CommunicationMode, instance_of(CommunicationMode)] = CommunicationMode.LEADER
    device_ids: Annotated[list[int] | None, optional(list_of(integer(0)))] = None
    participant_ids: Annotated[list[int] | None, optional(list_of(integer(0)))] = None
    orchestrator_config: Annotated[OrchestratorConfig | None, optional(instance_of(OrchestratorConfig))] = None
    num_nodes: Annotated[int | None, optional(integer(1))] = None
