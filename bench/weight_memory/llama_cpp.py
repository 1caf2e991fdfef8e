"""llama.cpp for comparison: its converter, and one sample of its server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from models import write_tokenizer

from scenarios.model import BenchModel

PROMPT, CONTEXT = 512, 32
START_SECONDS = 300.0
LEAST_DECODE = 0.5
"""Tokens per second; if decoding is slower, a prompt would take minutes."""


def convert(model: BenchModel, root: Path, home: Path) -> Path:
    """Converts ROOT/base to ROOT/gguf/base.gguf; an existing file is kept. Raises CalledProcessError on failure."""
    output = root / "gguf" / "base.gguf"
    if not output.exists():
        if not (root / "base" / "tokenizer.json").exists():
            write_tokenizer(model, root / "base")
        python = home / "venv-llama_cpp" / "bin" / "python"
        sources = next(home.glob("llama_cpp_python-*/vendor/llama.cpp"))
        script = Path(__file__).parents[1] / "peers" / "convert_gguf.py"
        subprocess.run([python, script, sources, root], check=True, stdout=2)
    return output


def measure(server: Path, gguf: Path, group: Path | None, tokens: int) -> dict[str, float]:
    """Figures of a server in the control group, or without one if None. Raises RuntimeError if the server ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(len(os.sched_getaffinity(0)))
    command = [
        server, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads, "-np", "1",
        "-c", "1024", "-b", "2048", "-ub", "512", "--no-warmup", "--cache-ram", "0",
    ]  # fmt: skip

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=enter)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process)
        seconds = time.perf_counter() - begin
        complete(address, CONTEXT, 2)
        figures = {
            "decode": 1e3 / complete(address, CONTEXT, 1 + tokens)["predicted_per_token_ms"],
            "seconds_to_start": seconds,
        }
        if figures["decode"] > LEAST_DECODE:
            figures["prefill"] = complete(address, PROMPT, 1)["prompt_per_second"]
        return figures
    finally:
        process.terminate()
        process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until the server has loaded its model."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2) as response:
                if json.load(response).get("status") == "ok":
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("llama-server did not start")
        time.sleep(0.05)


def complete(address: str, length: int, new_tokens: int) -> dict[str, Any]:
    """The server's own timings of one request."""
    prompt = np.random.default_rng(length).integers(100, 20000, length).tolist()
    body = {
        "prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False,
        "samplers": ["temperature"],
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=900) as response:
        timings: dict[str, Any] = json.load(response)["timings"]
    return timings
