"""llama.cpp's programs: its server, quantiser and measurement of perplexity."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
_REQUEST_SECONDS = 300.0
_LOWEST = -30.0
"""Lower log probs are not compared: the server computes them from probabilities, which may be 0 in float32."""
TOP = 8
"""Number of tokens whose log probs the server returns at each position."""


@dataclass(frozen=True)
class Position:
    """One generated token, and the log probs of the most likely tokens at its place, if the server returns them."""

    token: int
    log_probs: dict[int, float]


class Server:
    """A llama-server for one file, with keys and values in float32."""

    def __init__(self, programs: Path, file: Path, adapters: Sequence[Path] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._num_adapters = len(adapters)
        self._address = f"http://127.0.0.1:{port}"
        self._log = (file.parent / f"{file.stem}.log").open("w")
        command = [
            str(programs / "llama-server"), "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-t", "1",
            "-np", "1", "-c", "512", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup", "--cache-ram", "0",
        ]  # fmt: skip
        if adapters:
            command += ["--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        end = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"llama-server did not start; see {self._log.name}")
            time.sleep(0.05)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text. special: texts of special tokens become these tokens, and bos is added."""
        answer = self._post("/tokenize", {"content": text, "add_special": special, "parse_special": special})
        return [int(token) for token in answer["tokens"]]

    def complete(self, prompt: Sequence[int], num_tokens: int, adapter: int | None = None) -> list[Position]:
        """The greedy answer to a prompt."""
        body = {
            "prompt": list(prompt), "n_predict": num_tokens, "ignore_eos": False, "temperature": 0.0, "n_probs": TOP,
            "cache_prompt": False, "samplers": ["temperature"], "return_tokens": True,
            "lora": [{"id": each, "scale": float(each == adapter)} for each in range(self._num_adapters)],
        }  # fmt: skip
        answer = self._post("/completion", body)
        tokens, given = answer["tokens"], answer["completion_probabilities"]
        # The server leaves out positions at which a character is not complete yet. Tokens that occur once still tell
        # which ones have log probs.
        known = {each["id"]: each for each in given if tokens.count(each["id"]) == 1}
        at_places = given if len(given) == len(tokens) else [known.get(token) for token in tokens]
        return [Position(token, _log_probs(found)) for token, found in zip(tokens, at_places, strict=True)]

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/health", timeout=2) as response:
                return bool(json.load(response).get("status") == "ok")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def _log_probs(found: dict[str, Any] | None) -> dict[int, float]:
    top = [] if found is None else found["top_logprobs"]
    return {each["id"]: each["logprob"] for each in top if each["logprob"] > _LOWEST}


def quantize(programs: Path, source: Path, file: Path, kind: str) -> None:
    """Writes `file` with llama-quantize."""
    result = subprocess.run(
        [str(programs / "llama-quantize"), "--allow-requantize", str(source), str(file), kind],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"llama-quantize {file.name}: {result.stderr[-2000:]}")


def perplexity(programs: Path, file: Path, text: Path, window: int) -> float | None:
    """Returns the perplexity that llama-perplexity prints; None if there is no such program."""
    program = programs / "llama-perplexity"
    if not program.exists():
        return None
    command = [str(program), "-m", str(file), "-f", str(text), "-c", str(window), "-b", str(window), "-t", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", result.stdout + result.stderr)
    if found is None:
        raise RuntimeError(f"llama-perplexity {file.name}: {result.stderr[-2000:]}")
    return float(found[1])
