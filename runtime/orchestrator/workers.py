"""The processes that run an orchestrator's engine: starts, watches and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from ... import _core
from ..._core import ConfigError, EngineError, ExecutorConfig
from ..loaded_engine import LoadedEngine
from ..options.parallel import OrchestratorConfig
from ..ranks import TIME_LIMIT
from .launch import Launched
from .messages import receive, send
from .mode import require_workers
from .worker_process import WorkerProcess

_MODULE: Final = "adaptrt.runtime.orchestrator.worker"
_SECONDS_TO_LOOK: Final = 0.2
"""Seconds between two checks that mpirun still runs, while workers start."""
_SECONDS_TO_END: Final = 10.0
"""Seconds for workers to end after they were told to, and then for mpirun after they were killed."""
_SECONDS_FOR_OTHERS: Final = 0.5
"""Seconds for other workers after one failed to start: one of them may be the cause."""
_SECONDS_FOR_MPIRUN: Final = 1.0
"""Seconds for mpirun to report which process ended first, and how."""
_SECONDS_TO_EXPLAIN: Final = 5.0
"""Maximum seconds that a failing step waits for the name of the rank that ended; more than mpirun gets to end."""
_LOG: Final = logging.getLogger("adaptrt")


class Workers:
    """One process per rank of an engine, and the engine that they run together."""

    def __init__(self, engine: LoadedEngine, config: ExecutorConfig, orchestrator: OrchestratorConfig) -> None:
        """Starts the processes and waits until all are ready.

        Raises a worker's error with its rank; EngineError with the output of a worker that ended; ConfigError for an
        engine of one rank, and without MPI.
        """
        require_workers(engine)
        self._num_ranks: Final = engine.num_ranks
        self._workers: list[WorkerProcess] = []
        self._commands: socket.socket | None = None
        self._launched: Launched | None = None
        self._is_ending = False
        self._place: Final = Path(tempfile.mkdtemp(prefix="adaptrt-"))  # no other user can read it
        self._listening: Final = socket.socket(socket.AF_UNIX)
        try:
            path = self._listen()
            interpreter = orchestrator.worker_executable_path or sys.executable
            self._launched = Launched(self._num_ranks, interpreter, _MODULE, path)
            self._begin(
                {
                    "engine": str(engine.directory.absolute()),
                    "num_ranks": self._num_ranks,
                    "num_threads": config.num_threads,
                    "kernels": config.kernels,
                }
            )
            self._stop_listening()  # no file of it is left, however this process ends
            self._communicator: Final = self._communicate()
            self.engine: Final = _core.RemoteEngine(self._communicator)
        except BaseException:
            self._end()
            raise
        self.available_memory: Final = min(worker.memory for worker in self._workers)
        numbers = ", ".join(map(str, self.processes))
        _LOG.info("%s: run by processes %s", engine.directory, numbers)
        _let_go_in_forks(self)
        self._watcher = threading.Thread(target=self._watch, name="adaptrt-workers", daemon=True)
        self._watcher.start()

    @property
    def processes(self) -> list[int]:
        """Process ids by rank."""
        return [worker.process for worker in self._workers]

    def stop(self) -> None:
        """Waits until all processes have ended; kills those that do not end in time. May be called again."""
        self._is_ending = True
        self._communicator.lose("executor was shut down")
        self._watcher.join()

    def _listen(self) -> str:
        path = str(self._place / "socket")
        try:
            self._listening.bind(path)
        except OSError as error:
            raise ConfigError(f"{path}: the workers' socket cannot be made there: {error}") from error
        self._listening.listen(self._num_ranks + 1)
        return path

    def _begin(self, task: dict[str, Any]) -> None:
        """Waits until all workers have loaded their ranks, and rank 0 has its connection for commands."""
        give_up_at = None
        while self._commands is None or len(self._workers) < self._num_ranks or not self._have_begun():
            waiting = {worker.connection: worker for worker in self._workers if not worker.has_begun}
            readable = wait([self._listening, *waiting], timeout=_SECONDS_TO_LOOK)
            for source in readable:
                # wait() is declared to return sockets and numbers too; those are no keys of `waiting`.
                worker = waiting.get(source)  # type: ignore[call-overload]
                if worker is None:
                    self._accept(task)
                    continue
                message = receive(worker.connection)
                if message is None:
                    raise self._ended([worker])
                worker.begin(message)
            assert self._launched is not None
            if not readable and self._launched.has_ended:
                raise self._ended([])
            if give_up_at is None and any(worker.error for worker in self._workers):
                give_up_at = time.monotonic() + _SECONDS_FOR_OTHERS
            if give_up_at is not None and (time.monotonic() >= give_up_at or self._have_begun()):
                break
        self._workers.sort(key=lambda worker: worker.rank or 0)
        self._raise_failure()

    def _have_begun(self) -> bool:
        return all(worker.has_begun for worker in self._workers)

    def _accept(self, task: dict[str, Any]) -> None:
        accepted, _ = self._listening.accept()
        connection = Connection(accepted.detach())
        message = receive(connection)
        if message is None:
            connection.close()
        elif "commands" in message:
            self._commands = socket.socket(fileno=os.dup(connection.fileno()))
            connection.close()
        else:
            self._workers.append(WorkerProcess(connection, message["process"]))
            with contextlib.suppress(OSError):  # the worker has ended; its connection will tell
                send(connection, **task)

    def _raise_failure(self) -> None:
        failed = [(worker.rank, worker.error) for worker in self._workers if worker.error is not None]
        if not failed:
            return
        # Other ranks report that a rank failed; that rank's own error has the right type.
        own = [(rank, error) for rank, error in failed if not str(error).startswith("rank ")]
        rank, error = (own or failed)[0]
        subject = f"rank {rank} of {self._num_ranks}: " if own else ""
        raise type(error)(f"{subject}{error}")

    def _communicate(self) -> _core.SocketCommunicator:
        assert self._commands is not None
        return _core.SocketCommunicator(
            socket=os.dup(self._commands.fileno()),
            rank=0,
            peer=f"rank 0 of {self._num_ranks}",
            time_limit=TIME_LIMIT,
            time_to_explain=_SECONDS_TO_EXPLAIN,
        )

    def _watch(self) -> None:
        """Watches the workers until all have ended, or one that the engine needs. Runs in a thread."""
        assert self._commands is not None
        running = {worker.connection.fileno(): worker for worker in self._workers}
        poll = select.poll()
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        poll.register(self._commands, 0)  # reports a shutdown at either end
        end_at = None
        while running:
            milliseconds = None if end_at is None else max(0.0, end_at - time.monotonic()) * 1000
            events = poll.poll(milliseconds)
            if not events:
                break
            lost = []
            for descriptor, _ in events:
                worker = running.get(descriptor)
                if worker is None:
                    poll.unregister(descriptor)
                    end_at = time.monotonic() + _SECONDS_TO_END
                    continue
                message = receive(worker.connection)
                if message is None:
                    poll.unregister(descriptor)
                    del running[descriptor]
                    if not worker.is_done:
                        lost.append(worker)
                elif "failure" in message:
                    self._communicator.lose(message["failure"])
                else:
                    worker.is_done = True
            if lost and not self._is_ending and not self._communicator.is_lost:
                self._communicator.lose(str(self._ended(lost)))
            if lost or (self._communicator.is_lost and not self._is_ending):
                break
        self._end()

    def _ended(self, workers: Sequence[WorkerProcess]) -> EngineError:
        """Returns the error for workers that ended on their own; mpirun may name another one that ended first."""
        assert self._launched is not None
        self._launched.wait(_SECONDS_FOR_MPIRUN)
        printed, banner = self._launched.output()
        named = [worker for worker in self._workers if re.search(rf"\bPID {worker.process}\b", banner)]
        subjects = [
            f"{'a rank' if worker.rank is None else f'rank {worker.rank}'} of {self._num_ranks} "
            f"(process {worker.process}) has ended"
            for worker in named or workers
        ]
        subject = ", ".join(subjects) or f"the processes of {self._num_ranks} ranks have ended before they began"
        reason = re.search(r"EXIT STRING: (.*)", banner)
        if reason is not None:
            subject += f": {reason[1]}"
        return EngineError(f"{subject}; it printed:\n{printed}" if printed else subject)

    def _end(self) -> None:
        if self._launched is not None:
            self._launched.be_quiet()
            has_left = len(self._workers) == self._num_ranks and all(worker.is_done for worker in self._workers)
            if not (has_left and self._launched.wait(_SECONDS_TO_END)):
                self._launched.terminate()
                for worker in self._workers:
                    worker.kill()
                if not self._launched.wait(_SECONDS_TO_END):
                    self._launched.kill()
        for worker in self._workers:
            worker.close()
        self._stop_listening()
        if self._commands is not None:
            self._commands.close()

    def _stop_listening(self) -> None:
        self._listening.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def let_go(self) -> None:
        """Closes the orchestrator's connections in a forked process. Otherwise workers would see the orchestrator as
        alive.
        """
        nothing, _ = socket.socketpair()
        descriptors = [worker.connection.fileno() for worker in self._workers if not worker.connection.closed]
        if self._commands is not None and self._commands.fileno() >= 0:
            descriptors.append(self._commands.fileno())
        for descriptor in descriptors:
            os.dup2(nothing.fileno(), descriptor)
        nothing.close()


def _let_go_in_forks(workers: Workers) -> None:
    reference = weakref.ref(workers)

    def let_go() -> None:
        alive = reference()
        if alive is not None:
            alive.let_go()

    os.register_at_fork(after_in_child=let_go)
