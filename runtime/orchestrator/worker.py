"""A rank of an orchestrator's engine. mpirun runs python -m adaptrt.runtime.orchestrator.worker SOCKET.

The connection to the orchestrator stays open while both processes live. If the other end closes, the process ends at
once.
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
    """Runs a rank for the orchestrator that listens at `place`."""
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
    except AdaptrtError as error:  # the error names the lost rank
        _tell(orchestrator, failure=str(error))
        _leave()
    except Exception as error:  # out of memory, for example
        _tell(orchestrator, failure=f"rank {rank} of {task['num_ranks']}: {type(error).__name__}: {error}")
        _leave()
    _tell(orchestrator, is_done=True)


def _serve(engine: _core.Engine, place: Path) -> None:
    """Runs the engine's steps on rank 0."""
    commands = connect(place)
    send(commands, commands=True)
    # There is no time limit because the orchestrator's process may be stopped; its end is still noticed.
    communicator = _core.SocketCommunicator(
        socket=os.dup(commands.fileno()), rank=1, peer="the orchestrator", time_limit=None, time_to_explain=0.0
    )
    commands.close()
    _core.serve_engine(engine, communicator)


def _tell(orchestrator: Connection, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # the orchestrator may have ended
        send(orchestrator, **fields)


def _end_with(orchestrator: Connection) -> None:
    """Waits for the orchestrator's end, then ends this process."""
    receive(orchestrator)
    _leave()


def _leave() -> None:
    """Ends this process at once: MPI cannot be finalised without ranks that may be lost. mpirun ends the others."""
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
