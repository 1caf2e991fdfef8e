"""`adaptrt serve` in a separate process on a free port."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SECONDS_TO_END = 30


@contextlib.contextmanager
def http_server(engine: Path, *flags: object, pids: list[int] | None = None) -> Iterator[str]:
    """Starts a server and yields its address. Any failure in it, such as an internal error, fails the test.

    pids: the process's id is added to it.
    """
    command = [sys.executable, "-m", "adaptrt.builder.cli", "serve", engine, "--port", 0, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), _text(log)
            if pids is not None:
                pids.append(process.pid)
            yield line.split()[-1]
            assert process.poll() is None, _text(log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=SECONDS_TO_END)
        assert "Traceback" not in _text(log), _text(log)


def _text(log: tempfile._TemporaryFileWrapper[str]) -> str:
    log.seek(0)
    return log.read()
