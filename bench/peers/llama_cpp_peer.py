"""llama.cpp: llama-server over HTTP with token ids, F16 adapters."""

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
from pathlib import Path
from typing import Any

from worker import (
    ADAPTER_OF_ONE,
    BATCH,
    CONTEXT,
    GGUF,
    MIXED_TOKENS,
    Peer,
    Task,
    base_rows,
    decode_row,
    gguf_rows,
    long_decode_row,
    long_prompt_row,
    main,
    prefill_row,
)

START_SECONDS = 120.0
REQUEST_SECONDS = 900.0
BASE = -1
KEEPS_PROMPTS = "long-kept"
FILES = {"bf16": "base", "long": "base", KEEPS_PROMPTS: "base", "adapters": "base"}
"""GGUF file of each variant; all others are types of quantised files. `adapters`, and variants that end with
`-adapters`, load all adapters, and each request selects one of them. `long` has one slot, because a server divides its
context evenly among its slots; KEEPS_PROMPTS also reuses its last prompt."""
SLOT_TOKENS = 1024
NO_REPACK = "--no-repack"


class Server:
    """A llama-server."""

    def __init__(self, binary: Path, task: Task, variant: str, flags: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{free.getsockname()[1]}"
            port = free.getsockname()[1]
        folder = task.root / "gguf"
        self._keeps_prompts = variant == KEEPS_PROMPTS
        is_long = variant in ("long", KEEPS_PROMPTS)
        slots, context = (1, CONTEXT) if is_long else (BATCH, SLOT_TOKENS * BATCH)
        file = FILES.get(variant, f"base-{variant.removesuffix('-adapters')}")
        command = [
            str(binary), *flags, "-m", str(folder / f"{file}.gguf"), "--host", "127.0.0.1", "--port", str(port),
            "-t", str(task.threads), "-tb", str(task.threads), "-np", str(slots), "-c", str(context),
            "-b", "2048", "-ub", "512", "--no-warmup", "--cache-ram", "0", "--threads-http", str(BATCH + 4),
        ]  # fmt: skip
        if variant.endswith("adapters"):
            adapters = ",".join(str(folder / f"{path.name}.gguf") for path in task.loras)
            command += ["--lora", adapters, "--lora-init-without-apply"]
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
        """Returns the tokens of one request."""
        body: dict[str, Any] = {
            "prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "temperature": 0.0,
            "cache_prompt": self._keeps_prompts, "return_tokens": True, "samplers": ["temperature"],
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
        """One request per prompt, all at once; `adapters` has an adapter's number for each prompt."""
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
        """Ends the server."""
        self._process.terminate()
        self._process.wait()


def survives_repacking(binary: Path, task: Task) -> bool:
    """False if the server ends with repacked weights, when it starts or in a prompt, as on some CPUs with AMX."""
    files = [path.stem.removeprefix("base-") for path in (task.root / "gguf").glob("base-*.gguf")]
    if not files or "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return True
    try:
        server = Server(binary, task, files[0])
    except RuntimeError:
        return False
    try:
        server.complete(task.long, 1, BASE)
    except (urllib.error.URLError, ConnectionError):
        return False
    finally:
        server.close()
    return True


def make(task: Task) -> Peer:
    """A server for each kind of weights. LLAMA_SERVER is the path of the program that install.sh built."""
    binary = Path(os.environ["LLAMA_SERVER"])
    if not binary.is_file():
        raise FileNotFoundError(f"{binary}: no llama-server; bench/peers/install.sh llama_cpp builds it")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stderr.splitlines()
    flags = [] if survives_repacking(binary, task) else [NO_REPACK]
    no_dora = "llama.cpp's converter refuses the magnitudes of a DoRA adapter"
    return Peer(
        versions={"llama.cpp": " ".join([version[0] if version else "unknown", *flags])},
        load=lambda variant: Server(binary, task, variant, flags),
        rows={
            **base_rows(task, "bf16"),
            **long_prompt_row(task, "long"),
            **long_decode_row(task, KEEPS_PROMPTS),
            "prefill-512-lora": prefill_row("adapters", task.long, adapters=[ADAPTER_OF_ONE]),
            "decode-1-lora": decode_row("adapters", task.alone, adapters=[ADAPTER_OF_ONE]),
            "mixed-16": decode_row("adapters", task.batch, most_tokens=MIXED_TOKENS, adapters=list(range(BATCH))),
            **base_rows(task, "q8_0", "int8-"),
            **base_rows(task, "q4_0", "int4-"),
            **gguf_rows(task),
        },
        refused={
            "decode-1-dora": no_dora,
            "mixed-16-dora": no_dora,
            "adapter-load": "llama-server takes adapters only when it starts",
        },
        notes={
            "mixed-16": "16 requests at once; the server does not batch requests with different adapters",
            "int8-decode-1": "Q8_0: blocks of 32, activations quantised in the same way",
            **{f"{kind}-mixed-16": "16 requests at once, not in one batch" for kind in GGUF},
            "int4-decode-1": "Q4_0: blocks of 32, lm_head Q6_K; activations quantised to 8 bits",
        },
    )


if __name__ == "__main__":
    main(make)
