"""Runs child processes that call TensorRT, and converts their exits to results and errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

from ...._core import EngineError
from ....common.progress import Report
from ....formats.engine.tensorrt.package import Package, complete_libraries, installed_package
from .messages import (
    BUILT,
    DESCRIBED,
    FINAL_KINDS,
    LOG,
    PHASE,
    REFUSED,
    Built,
    PlanRequest,
    built_from_message,
    request_to_json,
)

_CHILD: Final = "adaptrt.builder.compile.tensorrt.child"
_LAST_WORDS: Final = 5


class Children:
    """The child processes of one build, which can be ended together."""

    def __init__(self) -> None:
        """Creates an empty collection."""
        self._lock = Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    @property
    def ended(self) -> bool:
        """True after end() was called."""
        return self._ended

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a child. It takes the lock, so that end() sees every child that was started."""
        with self._lock:
            child = subprocess.Popen(command, **options)
            self._running.add(child)
            if self._ended:
                child.kill()
        return child

    def end(self) -> None:
        """Ends the running children and waits for them; later ones are ended immediately."""
        with self._lock:
            self._ended = True
            running = list(self._running)
            for child in running:
                child.kill()
        for child in running:
            child.wait()

    def remove(self, child: subprocess.Popen[str]) -> None:
        """Ends a child if it is still running, and removes it."""
        with self._lock:
            self._running.discard(child)
            child.kill()
        child.wait()


def describe_package() -> Package:
    """The package that plans are built with. Raises ConfigError if there is none, EngineError if it fails to load."""
    name = installed_package()
    message = _converse(name, ["describe", name], "", f"package {name}", lambda phase, fraction: None, Children())
    assert message["kind"] == DESCRIBED
    return Package(name, message["version"], tuple(message["compute_capabilities"]))


def run_build(package: Package, request: PlanRequest, report: Report, children: Children) -> Built:
    """Builds a plan. Raises EngineError, with the node's name and TensorRT's message, if TensorRT fails or crashes, or
    if `children` are ended."""
    subject = package.title
    if request.compute_capability is not None:
        subject += f", compute capability {request.compute_capability}"
    report("Starting", 0.0)
    message = _converse(package.name, ["build"], request_to_json(request), subject, report, children)
    if message["kind"] == REFUSED:
        raise EngineError(f"{subject}: " + "; ".join(message["problems"]))
    assert message["kind"] == BUILT
    report("Done", 1.0)
    return built_from_message(message)


def _converse(
    package: str, arguments: Sequence[str], request: str, subject: str, report: Report, children: Children
) -> dict[str, Any]:
    """Runs a child until it exits. Returns its final message."""
    phase = ""
    logged: deque[str] = deque(maxlen=_LAST_WORDS)
    final: dict[str, Any] | None = None
    with _child(package, arguments, children) as (child, errors):
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # The child's exit says more.
            child.stdin.write(request)
            child.stdin.close()
        for line in child.stdout:
            if not line.endswith("\n"):
                break  # The child died in the middle of a message.
            message: dict[str, Any] = json.loads(line)
            if message["kind"] == LOG:
                logged.append(f"[{message['severity']}] {' '.join(message['text'].split())}")
            elif message["kind"] == PHASE:
                phase = message["name"]
                report(phase, message["fraction"])
            elif message["kind"] in FINAL_KINDS:
                final = message
        status = child.wait()
        if final is not None and status == 0:
            return final
        if children.ended:
            raise EngineError(f"{subject}: the build was cancelled")
        errors.seek(0)
        printed = " ".join(errors.read().decode(errors="replace").split())
    words = "; ".join([*logged, *([f"[stderr] {printed[-2000:]}"] if printed else [])])
    during = f" in the phase '{phase}'" if phase else ""
    raise EngineError(f"{subject}: the build process {_end(status)}{during}. Its last messages: {words or 'none'}")


@contextlib.contextmanager
def _child(package: str, arguments: Sequence[str], children: Children) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A child and the file with its stderr. The with statement ends the child if it is still running."""
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as directory, tempfile.TemporaryFile() as errors:
        child = children.start(
            [sys.executable, "-m", _CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            # Python imports modules from the working directory, which must not be another user's.
            cwd=directory,
            env=_environment(package, Path(directory)),
        )
        try:
            yield child, errors
        finally:
            children.remove(child)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _environment(package: str, directory: Path) -> Mapping[str, str]:
    """This process's environment, with its import path and the library path that the package needs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}
    libraries = complete_libraries(package, directory)
    if libraries is not None:
        known = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{libraries}{os.pathsep}{known}" if known else str(libraries)
    return environment


def _end(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
