"""llama.cpp: llama-server over HTTP with token ids, BF16 weights and F16 adapters."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from worker import ADAPTER_OF_ONE, BATCH, Peer, Task, decode_rate, main, prefill_rate, whole_rate

START_SECONDS = 120.0
REQUEST_SECONDS = 900.0
BASE = -1


class Server:
    """A llama-server with all adapters loaded; a request says which one acts."""

    def __init__(self, binary: Path, task: Task) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{free.getsockname()[1]}"
            port = free.getsockname()[1]
        folder = task.root / "gguf"
        adapters = ",".join(str(folder / f"{path.name}.gguf") for path in task.loras)
        command = [
            str(binary), "-m", str(folder / "base.gguf"), "--host", "127.0.0.1", "--port", str(port),
            "-t", str(task.threads), "-tb", str(task.threads), "-np", str(BATCH), "-c", str(1024 * BATCH),
            "-b", "2048", "-ub", "512", "--no-warmup", "--cache-ram", "0", "--threads-http", str(BATCH + 4),
            "--lora", adapters, "--lora-init-without-apply",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=2, stderr=2)
        end = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("llama-server did not start; its output is in the log")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/health", timeout=2) as response:
                return bool(json.load(response).get("status") == "ok")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def complete(self, prompt: list[int], new_tokens: int, adapter: int) -> list[int]:
        """The tokens of one request."""
        body: dict[str, Any] = {
            "prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False,
            "return_tokens": True, "samplers": ["temperature"],
            "lora": [] if adapter == BASE else [{"id": adapter, "scale": 1.0}],
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            tokens: list[int] = json.load(response)["tokens"]
        return tokens

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[int] | None = None
    ) -> list[list[int]]:
        """One request a prompt, all at once."""
        answers: list[list[int]] = [[] for _ in prompts]
        chosen = adapters or [BASE] * len(prompts)

        def send(index: int) -> None:
            answers[index] = self.complete(prompts[index], new_tokens, chosen[index])

        threads = [threading.Thread(target=send, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def make(task: Task) -> Peer:
    """LLAMA_SERVER names the program that install.sh built."""
    binary = Path(os.environ["LLAMA_SERVER"])
    if not binary.is_file():
        raise FileNotFoundError(f"{binary}: no llama-server; bench/peers/install.sh llama_cpp builds it")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stderr.splitlines()
    server, new = Server(binary, task), task.new_tokens
    generate = server.generate
    mixed = partial(generate, adapters=list(range(BATCH)))
    no_dora = "llama.cpp's converter refuses the magnitudes of a DoRA adapter"
    return Peer(
        versions={"llama.cpp": version[0] if version else "unknown"},
        rows={
            "prefill-512": lambda: prefill_rate(generate, task.long),
            "decode-1": lambda: decode_rate(generate, task.alone, new),
            "decode-16": lambda: decode_rate(generate, task.batch, new),
            "decode-1-lora": lambda: decode_rate(partial(generate, adapters=[ADAPTER_OF_ONE]), task.alone, new),
            "mixed-16": lambda: whole_rate(mixed, task.batch, task.mixed_tokens),
        },
        refused={
            "decode-1-dora": no_dora,
            "mixed-16-dora": no_dora,
            "adapter-load": "llama-server takes its adapters when it starts",
        },
        notes={"mixed-16": "16 requests at once; the server does not batch requests with different adapters"},
        close=server.close,
    )


if __name__ == "__main__":
    main(make)
