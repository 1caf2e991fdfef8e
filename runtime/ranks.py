"""Ranks of an engine as MPI processes."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import cache, cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .. import _core
from .._core import AdaptrtError, ConfigError, EngineError

if TYPE_CHECKING:
    from mpi4py import MPI

_Result = TypeVar("_Result")

TIME_LIMIT: Final = 8.0
"""Seconds until a rank that does not take part in an exchange counts as lost. Exchanges are much faster."""

_FORWARDING_TIME: Final = 0.3
"""Seconds for mpirun to forward a process's output before the processes are ended."""

_HEARING_TIME: Final = 0.01
"""Seconds between two checks for a message from rank 0."""

_STARTED_BY_MPI: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID")
"""Environment variables of processes that mpirun or srun starts: MPICH and its relatives, PMIx, Open MPI, MVAPICH,
Cray.
"""


def is_started_by_mpi() -> bool:
    """True if this process is one of several MPI processes. Does not initialise MPI.

    If an import of mpi4py.MPI has initialised MPI, the world's size decides; otherwise the launcher's environment
    variables do.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return bool(mpi.COMM_WORLD.size > 1)
    return any(name in os.environ for name in _STARTED_BY_MPI)


def rank_in(num_ranks: int) -> int:
    """Returns this process's rank in an engine of `num_ranks` ranks; 0 if MPI did not start that many processes."""
    if num_ranks == 1 or not is_started_by_mpi() or importlib.util.find_spec("mpi4py") is None:
        return 0
    world = _world()
    if world.size != num_ranks:
        return 0
    _abort_when_uncaught()
    return int(world.rank)


class Ranks:
    """This process and the other MPI processes. Their number must be the engine's number of ranks."""

    def __init__(self, num_ranks: int) -> None:
        """Raises ConfigError if MPI is missing or has started another number of processes."""
        if importlib.util.find_spec("mpi4py") is None:
            raise ConfigError(
                f"the engine has {num_ranks} ranks, which talk over MPI: pip install 'adaptrt[mpi]', then start it "
                f"with mpirun -n {num_ranks}"
            )
        self._world: Final = _world()
        if self._world.size != num_ranks:
            raise ConfigError(
                f"the engine has {num_ranks} ranks, and MPI has started {self._world.size}: start it with mpirun -n "
                f"{num_ranks}, or have it start its workers, with CommunicationMode.ORCHESTRATOR in "
                "ExecutorConfig.parallel_config"
            )
        self.rank: Final = int(self._world.rank)
        self.size: Final = num_ranks

    @cached_property
    def communicator(self) -> _core.Communicator:
        """Communicator of the engines. After it has lost a rank, this process and the others are ended."""
        from mpi4py import MPI

        own = self._world.Dup()
        made = _core.mpi_communicator(
            library=MPI.__file__,
            handle_bytes=MPI._sizeof(own),
            communicator=_handle(own),
            byte_type=_handle(MPI.BYTE),
            time_limit=TIME_LIMIT,
        )
        atexit.register(_abort_if_lost, made, self._world)
        return made

    @cached_property
    def on_this_host(self) -> int:
        """Number of ranks on this machine."""
        hosts = self._world.allgather(socket.gethostname())
        return int(hosts.count(hosts[self.rank]))

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Runs an action that every rank runs at this point, and returns its result.

        Raises its error if it fails here, and EngineError that names the rank if it fails elsewhere.
        """
        failure: AdaptrtError | None = None
        result: _Result | None = None
        try:
            result = action()
        except AdaptrtError as error:
            failure = error
        failures = self._world.allgather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise EngineError(f"rank {rank} of {self.size}: {text}")
        assert result is not None
        return result

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raises EngineError on every rank if one has other facts than rank 0."""
        of_ranks = self._world.allgather(facts)
        differing = [
            f"{name} is {theirs[name]!r} on rank {rank} and {ours!r} on rank 0"
            for rank, theirs in enumerate(of_ranks)
            for name, ours in of_ranks[0].items()
            if theirs[name] != ours
        ]
        if differing:
            raise EngineError("the ranks differ: " + "; ".join(differing))

    def gather(self, value: _Result) -> list[_Result]:
        """Returns all ranks' values, on every rank."""
        return list(self._world.allgather(value))

    def tell(self, value: object) -> None:
        """Sends a value from rank 0 to every other rank, which calls hear()."""
        for rank in range(1, self.size):
            self._world.send(value, rank)

    def hear(self) -> Any:
        """Waits for rank 0's next value without a busy loop."""
        while not self._world.iprobe(source=0):
            time.sleep(_HEARING_TIME)
        return self._world.recv(source=0)

    def least(self, value: int) -> int:
        """Returns the minimum of the ranks' values."""
        return min(self.gather(value))


@cache
def _world() -> MPI.Intracomm:
    try:
        # The import initialises MPI and finalises it at exit.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"mpi4py finds no MPI: {error}; pip install 'adaptrt[mpi]' brings one") from error
    return MPI.COMM_WORLD


@cache
def _abort_when_uncaught() -> None:
    """Makes an uncaught exception end all processes: the others would wait for this one."""
    report = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report(kind, error, traceback)
        sys.stderr.flush()
        time.sleep(_FORWARDING_TIME)
        _world().Abort(1)

    sys.excepthook = report_and_abort


def _handle(handle: Any) -> int:
    from mpi4py import MPI

    return int(MPI._handleof(handle)) % (1 << 64)


def _abort_if_lost(communicator: _core.Communicator, world: MPI.Intracomm) -> None:
    # MPI cannot be finalised after a rank was lost. Abort ends the remaining processes.
    if communicator.is_lost:
        world.Abort(1)
