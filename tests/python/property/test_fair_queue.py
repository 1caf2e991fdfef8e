"""The queue of slow work with random clients: turns, bounds, locks, clients that leave, and no lost job."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaptrt.serve.fair_queue import FairQueue, Job

CLIENTS = ("a", "b", "c", "d")
LOCKS = (None, None, "x", "y")


class FairQueueMachine(RuleBasedStateMachine):
    """Compares the queue with lists of jobs, one for each client."""

    @initialize(num_threads=st.integers(1, 4), max_waiting=st.integers(1, 9))
    def begin(self, num_threads: int, max_waiting: int) -> None:
        self.num_threads = num_threads
        self.max_waiting = max_waiting
        self.queue = FairQueue(num_threads, max_waiting)
        self.lines: dict[str, list[Job]] = {client: [] for client in CLIENTS}
        self.running: dict[Job, str | None] = {}
        # Other clients' starts since the last turn of a client that has a job ready to run.
        self.passed = dict.fromkeys(CLIENTS, 0)

    @rule(client=st.sampled_from(CLIENTS), lock=st.sampled_from(LOCKS))
    def put_new(self, client: str, lock: str | None) -> None:
        self._put(client, Job(lock))

    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def share(self, client: str, data: st.DataObject) -> None:
        waiting = [job for line in self.lines.values() for job in line if client not in job.clients]
        if waiting:
            self._put(client, data.draw(st.sampled_from(waiting)))

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client in CLIENTS if self.lines[client]]))
        job = data.draw(st.sampled_from(self.lines[client]))
        self.queue.leave(client, job)
        self.lines[client].remove(job)

    @rule()
    def start(self) -> None:
        free = [client for client in CLIENTS if self._can_run(client)]
        job = self.queue.start()
        if len(self.running) == self.num_threads or not free:
            assert job is None
            return
        assert job is not None
        assert job.is_running
        assert not job.clients
        taken = [client for client in free if job in self.lines[client]]
        for client in CLIENTS:
            if job in self.lines[client]:
                self.lines[client].remove(job)
        self.running[job] = None
        for client in free:
            self.passed[client] = 0 if client in taken else self.passed[client] + 1
            # Each other client has at most one turn before a client's next turn.
            assert self.passed[client] < len(CLIENTS)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(list(self.running)))
        self.queue.finish(job)
        del self.running[job]
        assert not job.is_running

    @invariant()
    def keeps_its_bounds(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.num_waiting == sum(map(len, self.lines.values())) <= self.max_waiting
        assert self.queue.num_running == len(self.running) <= self.num_threads
        locks = [job.lock for job in self.running if job.lock is not None]
        assert len(locks) == len(set(locks))
        for client, line in self.lines.items():
            assert all(client in job.clients for job in line)
            assert self._held(client) <= max(1, self.num_threads - 1)

    def teardown(self) -> None:
        """All waiting jobs run after the running ones end."""
        if not hasattr(self, "queue"):
            return
        waiting = {job for line in self.lines.values() for job in line}
        while self.running or waiting:
            for job in list(self.running):
                self.queue.finish(job)
                del self.running[job]
            while (started := self.queue.start()) is not None:
                waiting.remove(started)
                self.running[started] = None
            assert self.running or not waiting
        assert (self.queue.num_waiting, self.queue.num_running) == (0, 0)

    def _put(self, client: str, job: Job) -> None:
        lengths = {other: len(line) for other, line in self.lines.items()}
        given_up = self.queue.put(client, job)
        if sum(lengths.values()) < self.max_waiting:
            assert given_up is None
        else:
            assert given_up is not None
            longest = max(lengths.values())
            if given_up == (client, job):
                assert longest <= lengths[client] + 1
                return
            other, last = given_up
            assert lengths[other] == longest > lengths[client] + 1
            assert self.lines[other].pop() is last
        self.lines[client].append(job)

    def _held(self, client: str) -> int:
        return self.queue.num_held(client)

    def _can_run(self, client: str) -> bool:
        locks = {job.lock for job in self.running if job.lock is not None}
        return self._held(client) < max(1, self.num_threads - 1) and any(
            job.lock not in locks for job in self.lines[client]
        )


FairQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestFairQueue = FairQueueMachine.TestCase


def test_a_client_with_many_jobs_leaves_a_thread_to_others() -> None:
    queue = FairQueue(4, 100)
    for _ in range(20):
        queue.put("many", Job())
    started = [queue.start() for _ in range(4)]
    assert [job is not None for job in started] == [True, True, True, False]
    own = Job()
    queue.put("one", own)
    assert queue.start() is own


def test_clients_take_turns() -> None:
    queue = FairQueue(1, 100)
    names: dict[Job, str] = {}
    for client in ("a", "a", "a", "b", "b", "c"):
        job = Job()
        names[job] = client
        queue.put(client, job)
    order = []
    while (job := queue.start()) is not None:
        order.append(names[job])
        queue.finish(job)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_locked_job_takes_no_thread() -> None:
    queue = FairQueue(3, 100)
    first, second, other = Job("x"), Job("x"), Job("y")
    for job in (first, second, other):
        queue.put("a", job)
    assert [queue.start(), queue.start(), queue.start()] == [first, other, None]
    queue.finish(other)
    assert queue.start() is None
    queue.finish(first)
    assert queue.start() is second
