"""Abrupt ends: interpreter exit, forks, waiting threads, and executors that lose their last reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.models import ModelSpec
from support.serving import build_random_engine

PREAMBLE = """
import os, sys, threading, time
import adaptrt
executor = adaptrt.Executor(sys.argv[1])
running = executor.enqueue_request(adaptrt.Request([3, 4, 5], 600))
"""
# The threads must not print: Python aborts if a daemon thread does so while the interpreter ends.
WAITERS = """
def wait():
    try:
        while True:
            executor.await_responses(executor.enqueue_request(adaptrt.Request([3, 4, 5], 600)))
    except adaptrt.ExecutorClosedError:
        pass
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
"""
ENDS = {
    "exit": ("sys.exit(3)", 3),
    "end of the script": ("", 0),
    "an exception": ("raise SystemExit(4)", 4),
    "daemon threads that enqueue and wait": (WAITERS, 0),
    "the last reference": ("del executor", 0),
    "a cycle": ("cycle = [executor]; cycle.append(cycle); del executor, cycle", 0),
    "a response that is kept": ("response = executor.await_responses(running)[0]", 0),
}
FORK = """
child = os.fork()
if child == 0:
    assert not executor.is_alive
    for call in (lambda: executor.enqueue_request(adaptrt.Request([1], 1)), executor.await_responses):
        try:
            call()
        except adaptrt.ExecutorClosedError as error:
            assert "forked" in str(error)
        else:
            os._exit(5)
    executor.shutdown()
    del executor
    with adaptrt.Executor(sys.argv[1]) as own:
        assert own.await_responses(own.enqueue_request(adaptrt.Request([3], 2)))[-1].result.is_final
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(executor.await_responses(running)[-1].result.output_token_ids[0]) == 603
"""


# The executor's thread drops the last reference to the post-processor of a request that has not started.
DROPPED_BY_A_THREAD = """
import sys, time, weakref
import adaptrt
from adaptrt import _core
config = adaptrt.ExecutorConfig(num_threads=1, max_batch_size=1)
executor = _core.Executor(adaptrt.load_engine(sys.argv[1]).start(config), config, 1 << 28)
def process(request_id, logits, tokens, stream, client_id):
    pass
known = weakref.ref(process)
running = executor.enqueue_request(adaptrt.Request([3, 4, 5], 600))
waiting = executor.enqueue_request(adaptrt.Request([3, 4, 5], 8, logits_post_processor=process))
del process
executor.cancel_request(waiting)
"""
# The thread waits for the GIL when the interpreter begins to end, and gets it while a finalised object sleeps.
AT_EXIT = """
class Sleeper:
    def __del__(self, sleep=time.sleep):
        sleep(1)
adaptrt.sleeper = Sleeper()
sys.setswitchinterval(100)
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
"""
WHILE_RUNNING = """
executor.await_responses(running)
end = time.monotonic() + 30
while known() is not None and time.monotonic() < end:
    time.sleep(0.01)
assert known() is None
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_engine(ModelSpec(), tmp_path_factory.mktemp("lifetime"))[1]


def run(engine: Path, script: str) -> subprocess.CompletedProcess[str]:
    # A script that hangs fails the test.
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, str(engine)], timeout=60, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("script", "status"), ENDS.values(), ids=ENDS)
def test_exit_without_shutdown(engine: Path, script: str, status: int) -> None:
    done = run(engine, script)
    assert done.returncode == status, done.stderr
    assert "terminate" not in done.stderr


def test_a_fork_has_no_executor_but_may_make_one(engine: Path) -> None:
    done = run(engine, FORK)
    assert done.returncode == 0, done.stderr


def test_shutdown_ends_the_threads_of_steps_though_the_executor_is_kept(engine: Path) -> None:
    script = """
import os, sys
import adaptrt
executor = adaptrt.Executor(sys.argv[1], executor_config=adaptrt.ExecutorConfig(num_threads=9))
executor.await_responses(executor.enqueue_request(adaptrt.Request([3, 4, 5], 2)))
assert len(os.listdir("/proc/self/task")) >= before + 9
executor.shutdown()
assert len(os.listdir("/proc/self/task")) <= before + 2  # those of the LoRA cache sleep
"""
    script = script.replace("import adaptrt\n", "import adaptrt\nbefore = len(os.listdir('/proc/self/task'))\n")
    found = subprocess.run([sys.executable, "-c", script, str(engine)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("end", [AT_EXIT, WHILE_RUNNING], ids=["at exit", "while running"])
def test_a_thread_without_the_gil_drops_an_object(engine: Path, end: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", DROPPED_BY_A_THREAD + end, str(engine)],
        timeout=60, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "terminate" not in found.stderr
