"""A queue of jobs for a few threads, shared fairly by clients. Bookkeeping only: no threads, locks or I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Final


class Job:
    """A piece of work. A job of several clients waits in the line of each of them."""

    def __init__(self, lock: Hashable | None = None) -> None:
        """lock: jobs with an equal lock never run at the same time; None: the job excludes no other."""
        self.lock: Final = lock
        self.clients: set[str] = set()
        """Clients whose lines hold the job."""
        self.is_running = False


class FairQueue:
    """Jobs that wait for one of `num_threads` threads, one line per client.

    Clients take turns. If there is more than one thread, no client holds all of them. When all places are taken, a new
    job gets the last place of the client with the most places, unless its own client would then have as many.
    """

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        """max_waiting: number of places, shared by all clients. A job takes one place in each of its lines."""
        self._num_threads = num_threads
        self._threads_per_client = max(1, num_threads - 1)
        self._max_waiting = max_waiting
        # The first client has the next turn. No line stays empty.
        self._lines: OrderedDict[str, OrderedDict[Job, None]] = OrderedDict()
        self._num_waiting = 0
        self._running: dict[Job, str] = {}
        self._held: Counter[str] = Counter()
        self._locked: set[Hashable] = set()

    @property
    def num_waiting(self) -> int:
        """Number of places that are taken."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Number of threads that are taken."""
        return len(self._running)

    def num_held(self, client: str) -> int:
        """Number of threads that run jobs of a client."""
        return self._held.get(client, 0)

    def put(self, client: str, job: Job) -> tuple[str, Job] | None:
        """Adds a job to a client's line. The job must not run or wait in that line already.

        Returns the displaced place as (client, job); None if there was room. Returns the new job itself if it gets no
        place.
        """
        displaced: tuple[str, Job] | None = None
        if self._num_waiting >= self._max_waiting:
            longest = max(self._lines, key=lambda other: len(self._lines[other]), default=client)
            if len(self._lines.get(longest, ())) <= len(self._lines.get(client, ())) + 1:
                return client, job
            displaced = longest, next(reversed(self._lines[longest]))
            self.leave(*displaced)
        self._lines.setdefault(client, OrderedDict())[job] = None
        job.clients.add(client)
        self._num_waiting += 1
        return displaced

    def leave(self, client: str, job: Job) -> None:
        """Removes a waiting job from a client's line. The job is dropped if it waits in no other line."""
        line = self._lines[client]
        del line[job]
        if not line:
            del self._lines[client]
        job.clients.discard(client)
        self._num_waiting -= 1

    def start(self) -> Job | None:
        """Starts the next job and returns it; None if no job can run."""
        if len(self._running) >= self._num_threads:
            return None
        for client, line in self._lines.items():
            if self._held[client] >= self._threads_per_client:
                continue
            job = next((job for job in line if job.lock is None or job.lock not in self._locked), None)
            if job is not None:
                self._begin(client, job)
                return job
        return None

    def finish(self, job: Job) -> None:
        """Frees the thread and the lock of a running job."""
        client = self._running.pop(job)
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._locked.discard(job.lock)
        job.is_running = False

    def _begin(self, client: str, job: Job) -> None:
        for waiting in tuple(job.clients):
            self.leave(waiting, job)
        if client in self._lines:
            self._lines.move_to_end(client)
        self._running[job] = client
        self._held[client] += 1
        if job.lock is not None:
            self._locked.add(job.lock)
        job.is_running = True
