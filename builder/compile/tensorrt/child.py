"""The child process that calls TensorRT: reads one request from stdin, writes messages to stdout, and exits.

    python -m adaptrt.builder.compile.tensorrt.child describe PACKAGE
    python -m adaptrt.builder.compile.tensorrt.child build < request

Messages are sent immediately, so that the parent has TensorRT's last message if this process crashes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from threading import Lock
from typing import Any

from ...._core import AdaptrtError
from ....formats.engine.tensorrt.capability import offered
from .messages import DESCRIBED, REFUSED, built_to_message, request_from_json
from .refusal import PlanRefusedError


class Messages:
    """Connection to the parent."""

    def __init__(self) -> None:
        """Reserves stdout for messages; other output to stdout is redirected to stderr."""
        self._lock = Lock()
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Exits if the parent has exited."""
        line = json.dumps(message) + "\n"
        try:
            with self._lock:  # TensorRT's threads log too.
                self._out.write(line)
                self._out.flush()
        except BrokenPipeError:
            os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Runs the request from the arguments and stdin. Returns 0 unless this process has a defect."""
    # A terminal sends SIGINT to both processes; the parent ends the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages = Messages()
    if arguments[0] == "describe":
        messages.send(_describe(arguments[1]))
        return 0
    # onnx takes most of the start, and `describe` does without it.
    from .build_plan import build_plan

    request = request_from_json(sys.stdin.read())
    trt = importlib.import_module(request.package)
    try:
        messages.send(built_to_message(build_plan(trt, request, messages.send)))
    except PlanRefusedError as refusal:
        messages.send({"kind": REFUSED, "problems": refusal.problems})
    except AdaptrtError as error:
        messages.send({"kind": REFUSED, "problems": [str(error)]})
    except OSError as error:
        if error.filename is None:
            raise  # Other errors are defects, unlike files that cannot be read or written.
        messages.send({"kind": REFUSED, "problems": [f"{error.filename}: {error.strerror}"]})
    return 0


def _describe(package: str) -> dict[str, Any]:
    trt = importlib.import_module(package)
    capabilities = offered(trt.ComputeCapability.__members__) if hasattr(trt, "ComputeCapability") else ()
    return {"kind": DESCRIBED, "version": trt.__version__, "compute_capabilities": capabilities}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
