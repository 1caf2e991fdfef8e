"""The processes that run an orchestrator's engine: how they begin, what is noticed of them, and how they end."""

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
"""How often it is looked, while workers begin, whether mpirun has ended."""
_SECONDS_TO_END: Final = 10.0
"""What workers get that were told to end, and then mpirun when they were killed."""
_SECONDS_FOR_OTHERS: Final = 0.5
"""What others get when a worker has failed to begin: it may have been their fault."""
_SECONDS_FOR_MPIRUN: Final = 1.0
"""To say which process ended first, and how."""
_SECONDS_TO_EXPLAIN: Final = 5.0
"""What a step that fails waits at most for the name of the rank that has ended: more than mpirun gets to end."""
_LOG: Final = logging.getLogger("adaptrt")


class Workers:
    """As many processes as an engine has ranks, and the engine that they run together."""

    def __init__(self, engine: LoadedEngine, config: ExecutorConfig, orchestrator: OrchestratorConfig) -> None:
        """Starts them and waits until all have begun.

        Raises what a worker raised, with its rank; EngineError with what was printed where one has ended; ConfigError
        for an engine of one rank, and where there is no MPI.
        """
        require_workers(engine)
        self._num_ranks: Final = engine.num_ranks
        self._workers: list[WorkerProcess] = []
        self._commands: socket.socket | None = None
        self._launched: Launched | None = None
        self._is_ending = False
        self._place: Final = Path(tempfile.mkdtemp(prefix="adaptrt-"))  # which no other user can look into
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
            self._stop_listening()  # so that nothing is left of it, however this process ends
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
        """Ids, by rank."""
        return [worker.process for worker in self._workers]

    def stop(self) -> None:
        """Returns when all have ended, as the engine's last command told them, or are made to. May be called again."""
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
        """Until all workers have loaded their ranks, and the leader has its connection for commands."""
        give_up_at = None
        while self._commands is None or len(self._workers) < self._num_ranks or not self._have_begun():
            waiting = {worker.connection: worker for worker in self._workers if not worker.has_begun}
            readable = wait([self._listening, *waiting], timeout=_SECONDS_TO_LOOK)
            for source in readable:
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
            with contextlib.suppress(OSError):  # it has ended, as its connection will tell
                send(connection, **task)

    def _raise_failure(self) -> None:
        failed = [(worker.rank, worker.error) for worker in self._workers if worker.error is not None]
        if not failed:
            return
        # The others say that a rank has failed, which says so itself in the error's own type.
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
        """In its thread: until all have ended, or one that the engine cannot do without."""
        assert self._commands is not None
        running = {worker.connection.fileno(): worker for worker in self._workers}
        poll = select.poll()
        for descriptor in running:
            poll.register(descriptor, select.POLLIN)
        poll.register(self._commands, 0)  # which tells when it is shut down at either end
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
        """What is said of workers that have ended on their own, unless mpirun says that another was the first."""
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
        """In a forked process: what the orchestrator has open, which else would seem to live as long as this one."""
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
