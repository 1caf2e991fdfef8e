"""A peer's process. It is stopped (SIGSTOP) while others are measured, so that its waiting threads use no CPU."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from adaptrt.tools.bench.noise import NoiseMeter

HERE = Path(__file__).parent
OURS = "adaptrt"
END_SECONDS = 30.0


class PeerError(Exception):
    """A peer could not be started, could not measure a row, or did not answer."""


class PeerProcess:
    """One peer in its own virtual environment."""

    def __init__(self, name: str, root: Path, home: Path, threads: int, new_tokens: int, patience: float) -> None:
        """Starts it. `patience` is the maximum number of seconds to wait for an answer. Raises PeerError."""
        python = sys.executable if name == OURS else str(home / f"venv-{name}" / "bin" / "python")
        if not Path(python).exists():
            raise PeerError(f"not installed; run bench/peers/install.sh HOME {name}")
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
            "LLAMA_SERVER": str(home / "llama-build" / "bin" / "llama-server"),
        }  # fmt: skip
        self._patience = patience
        self._log = (home / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / f"{name}_peer.py"), "--root", str(root), "--threads", str(threads),
             "--new_tokens", str(new_tokens)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.about = self._answer()
        except PeerError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """True if it can answer."""
        return self._process.poll() is None

    def warm_up(self, row: str) -> None:
        """Loads the data that a row needs and runs it for a few tokens. Raises PeerError."""
        self._ask(row, warm_up=True)

    def measure(self, row: str) -> tuple[dict[str, float], NoiseMeter]:
        """Takes a sample of a row, and measures the noise meanwhile. Raises PeerError."""
        with NoiseMeter(self._processes()) as meter:
            answer = self._ask(row, warm_up=False)
        return answer["metrics"], meter

    def pause(self) -> None:
        """Stops the process and its children."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the process and its children."""
        assert self._process.stdin is not None
        if self.is_alive:
            self._signal(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        self._signal(signal.SIGKILL)  # Children that it left.
        self._log.close()

    def _ask(self, row: str, *, warm_up: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"row": row, "warm_up": warm_up}) + "\n")
            self._process.stdin.flush()
            return self._answer()
        except BrokenPipeError:
            raise PeerError(self._end()) from None
        finally:
            self.pause()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise PeerError(f"no answer within {self._patience:g} s; see {Path(self._log.name).name} in HOME")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _end(self) -> str:
        return f"its process ended with status {self._process.wait()}; see {Path(self._log.name).name} in HOME"

    def _processes(self) -> list[int]:
        """Ids of the process and its children."""
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        except FileNotFoundError:
            return []
        return [self._process.pid, *map(int, children)]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
