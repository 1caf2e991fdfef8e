"""A rank of an orchestrator's engine: python -m adaptrt.runtime.orchestrator.worker SOCKET, by mpirun.

Its connection to the orchestrator is open as long as both live: a process whose other end has gone ends at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ... import _core
from ..._core import AdaptrtError, ExecutorConfig
from ..engine import load_engine
from ..native_engine import NativeEngine
from ..ranks import rank_in
from .messages import connect, receive, send


def main(place: Path) -> None:
    """Does as the orchestrator says that listens at `place`."""
    orchestrator = connect(place)
    send(orchestrator, process=os.getpid())
    task = receive(orchestrator)
    if task is None:
        return
    rank = 0
    try:
        rank = rank_in(task["num_ranks"])
        loaded = load_engine(task["engine"])
        assert isinstance(loaded, NativeEngine)
        started = loaded.start(ExecutorConfig(num_threads=task["num_threads"], kernels=task["kernels"]))
        memory = loaded.available_memory()
    except AdaptrtError as error:
        send(orchestrator, rank=rank, error=type(error).__name__, text=str(error))
        _end_with(orchestrator)
        return
    send(orchestrator, rank=rank, memory=memory)
    threading.Thread(target=_end_with, args=(orchestrator,), name="adaptrt-orchestrator", daemon=True).start()
    try:
        if rank == 0:
            _serve(started, place)
        else:
            _core.serve_rank(started, loaded.ranks.communicator)
    except AdaptrtError as error:  # which names the rank that is lost
        _tell(orchestrator, failure=str(error))
        _leave()
    except Exception as error:  # memory that there is none of, say
        _tell(orchestrator, failure=f"rank {rank} of {task['num_ranks']}: {type(error).__name__}: {error}")
        _leave()
    _tell(orchestrator, is_done=True)


def _serve(engine: _core.Engine, place: Path) -> None:
    """On the leader, which steps the engine."""
    commands = connect(place)
    send(commands, commands=True)
    # A wait for an orchestrator that was stopped is no failure; one that has ended is noticed.
    communicator = _core.SocketCommunicator(
        socket=os.dup(commands.fileno()), rank=1, peer="the orchestrator", time_limit=None, time_to_explain=0.0
    )
    commands.close()
    _core.serve_engine(engine, communicator)


def _tell(orchestrator: Connection, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # it may be what has ended
        send(orchestrator, **fields)


def _end_with(orchestrator: Connection) -> None:
    """Waits for the orchestrator's end."""
    receive(orchestrator)
    _leave()


def _leave() -> None:
    """At once: MPI cannot be finalised without ranks that may be lost, and mpirun ends the others."""
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
