"""TensorRT-LLM's configuration of a model in several processes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

from .checked_fields import ANYTHING, BOOL, TEXT, CheckedFields, instance_of, integer, list_of, optional


class CommunicationType(enum.Enum):
    """Way in which processes communicate."""

    MPI = 0


class CommunicationMode(enum.Enum):
    """The process that starts the others."""

    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(eq=False)
class OrchestratorConfig(CheckedFields):
    """Options of an orchestrator that starts its workers.

    worker_executable_path: Python for the workers, or a program that is called like Python and becomes it; empty or
    None: this process's Python. Executors accept only the defaults of the other fields.
    """

    is_orchestrator: Annotated[bool, BOOL] = True
    worker_executable_path: Annotated[str | None, optional(TEXT)] = ""
    orch_leader_comm: Annotated[Any, ANYTHING] = None
    spawn_processes: Annotated[bool, BOOL] = True


@dataclass(eq=False)
class ParallelConfig(CheckedFields):
    """ExecutorConfig.parallel_config. Fields that have no meaning here must be None.

    LEADER: mpirun has started one process per rank, and each makes the executor. ORCHESTRATOR: this process has the
    executor and starts one worker per rank as orchestrator_config says (None: the default one).

    device_ids: a list with the number of the GPU that runs the engine, in the order of CUDA, from 0 on. None: the first
    one, or an engine for CPUs.
    """

    communication_type: Annotated[CommunicationType, instance_of(CommunicationType)] = CommunicationType.MPI
    communication_mode: Annotated[CommunicationMode, instance_of(CommunicationMode)] = CommunicationMode.LEADER
    device_ids: Annotated[list[int] | None, optional(list_of(integer(0)))] = None
    participant_ids: Annotated[list[int] | None, optional(list_of(integer(0)))] = None
    orchestrator_config: Annotated[OrchestratorConfig | None, optional(instance_of(OrchestratorConfig))] = None
    num_nodes: Annotated[int | None, optional(integer(1))] = None
