"""Applications of `adaptrt.serve.ray` in a separate Ray, which this process starts and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SECONDS_TO_START = 120.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # With Ray's default of 15, a parallel test could delay Serve's start beyond its time limit.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
OBJECT_STORE_BYTES = 100 << 20
"""Small, because requests and answers are small."""


@contextlib.contextmanager
def ray_serve(num_cpus: int) -> Iterator[str]:
    """Yields the address of Serve's proxy. All processes of Ray end with it."""
    os.environ.update(_ENVIRONMENT)
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="warning",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def run_application(name: str, args: Mapping[str, Any]) -> None:
    """Starts an application below the path /NAME and waits until it is ready."""
    from ray import serve

    from adaptrt.serve.ray import build_app

    serve.run(build_app(dict(args)), name=name, route_prefix=f"/{name}")


def kill_one(application: str, deployment: str) -> None:
    """Kills a replica of this process's Ray, as the kernel does when memory runs out. Other Rays may run too."""
    title = f"ray::ServeReplica:{application}:{deployment}"
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not directory.name.isdigit() or not (directory / "cmdline").read_bytes().startswith(title.encode()):
                continue
            process = int(directory.name)
            if os.getpid() in _ancestors(process):
                os.kill(process, signal.SIGKILL)
                return
    raise AssertionError(f"no process below this one is called {title}")


def _ancestors(process: int) -> Iterator[int]:
    """Yields a process's ancestors. Raises OSError if a process ends meanwhile."""
    while process > 1:
        # State and parent follow the name, which may contain parentheses.
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        yield process


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until the condition is true."""
    end = time.monotonic() + SECONDS_TO_START
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
