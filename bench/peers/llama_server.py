"""Runs llama-server with one model, and returns the request times that it reports."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS, _REQUEST_SECONDS = 120.0, 7200.0


@dataclass(frozen=True)
class Times:
    """Times of one request in seconds."""

    prefill: float
    token: float
    """Time of each token after the first."""


@dataclass(frozen=True)
class LlamaServer:
    """A server that is ready."""

    address: str
    process: int

    def measure(self, prompt: Sequence[int], new_tokens: int, *, computed: int | None = None) -> Times:
        """Measures a prompt of which `computed` tokens are computed, while the others are in the slot; None: all.

        Raises RuntimeError if the server computed another number.
        """
        body = {
            "prompt": list(prompt), "n_predict": new_tokens + 1, "ignore_eos": True, "temperature": 0.0,
            "cache_prompt": computed is not None, "repeat_penalty": 1.0,
        }  # fmt: skip
        timings = self._post("completion", body)["timings"]
        if computed is not None and timings["prompt_n"] != computed:
            raise RuntimeError(f"the server computed {timings['prompt_n']} tokens of the prompt, not {computed}")
        # Older servers divide by all tokens, although the first one comes with the prompt.
        return Times(timings["prompt_ms"] / 1e3, timings["predicted_ms"] / max(1, timings["predicted_n"] - 1) / 1e3)

    def save_slot(self, name: str) -> None:
        """Saves the slot to a file in the directory given by --slot-save-path."""
        self._post("slots/0?action=save", {"filename": name})

    def restore_slot(self, name: str) -> None:
        """Restores the slot from such a file."""
        self._post("slots/0?action=restore", {"filename": name})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            return json.load(response)


@contextlib.contextmanager
def llama_server(
    home: Path, model: Path, *, threads: int, context: int, flags: Sequence[object]
) -> Iterator[LlamaServer]:
    """Starts the server from bench/peers/install.sh's `home` with a GGUF file. Raises RuntimeError if it does not
    start."""
    command: list[object] = [
        home / "llama-build" / "bin" / "llama-server", "-m", model, "-t", threads, "-tb", threads,
        "-np", 1, "-c", context, "--no-warmup", "--cache-ram", 0, *flags,
    ]  # fmt: skip
    with started(command, "health") as server:
        yield server


@contextlib.contextmanager
def started(command: Sequence[object], answers_when_loaded: str) -> Iterator[LlamaServer]:
    """Starts any server with this interface on a free port. It is ready when it answers at the given path.

    Raises RuntimeError if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = [str(part.absolute() if isinstance(part, Path) else part) for part in (*command, "--port", port)]
    logs = tempfile.TemporaryDirectory()  # Older servers write a log file to their working directory.
    server = subprocess.Popen(parts, cwd=logs.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/{answers_when_loaded}", server)
        yield LlamaServer(address, server.pid)
    finally:
        server.terminate()
        server.wait()
        logs.cleanup()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError("the server did not start")
