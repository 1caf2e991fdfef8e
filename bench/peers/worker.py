"""What every peer's process shares: the rows, how a rate is made of two runs, and the talk with the orchestrator.

Runs in the peer's own virtual environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BATCH = 16
MIXED_TOKENS = 32
"""New tokens of a request in the rows with several adapters, for all peers: some are very slow there."""
ADAPTER_OF_ONE = 1  # rank 16
Metrics = dict[str, float]
Measure = Callable[[], Metrics]


@dataclass
class Task:
    """What all peers get: the model's directory, its prompts, and how much to run."""

    root: Path
    threads: int
    new_tokens: int
    prompts: dict[str, list[list[int]]]

    @property
    def base(self) -> Path:
        """The Hugging Face directory."""
        return self.root / "base"

    @property
    def loras(self) -> list[Path]:
        """PEFT directories of the 16 LoRA adapters, of rank 8, 16, 32 and 64 in turn."""
        return [self.root / "adapters" / f"lora{index:02d}" for index in range(BATCH)]

    @property
    def doras(self) -> list[Path]:
        """PEFT directories of the 8 DoRA adapters, of the ranks of the first 8 LoRA ones."""
        return [self.root / "adapters" / f"dora{index:02d}" for index in range(BATCH // 2)]

    @property
    def mixed_tokens(self) -> int:
        """New tokens in the rows with several adapters."""
        return min(MIXED_TOKENS, self.new_tokens)

    @property
    def alone(self) -> list[list[int]]:
        """One short prompt."""
        return self.prompts["short"][:1]

    @property
    def batch(self) -> list[list[int]]:
        """Sixteen short prompts."""
        return self.prompts["short"]

    @property
    def long(self) -> list[int]:
        """One prompt of 512 tokens."""
        return self.prompts["long"][0]


@dataclass
class Peer:
    """What a peer's script makes: how each row is measured, or why it is not."""

    versions: dict[str, str]
    rows: dict[str, Measure]
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


Generate = Callable[[Sequence[list[int]], int], Sequence[Sequence[int]]]
"""generate(prompts, new tokens): runs the batch to its end and returns the tokens of each prompt."""


def timed(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Seconds of a batch. Raises RuntimeError unless every prompt got all of its tokens."""
    start = time.perf_counter()
    answers = generate(prompts, new_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [new_tokens] * len(prompts):
        raise RuntimeError(f"asked for {new_tokens} tokens for each of {len(prompts)} prompts, got {lengths}")
    return seconds


def prefill_rate(generate: Generate, prompt: list[int]) -> Metrics:
    """Tokens of a prompt per second, from the time to its first token."""
    seconds = timed(generate, [prompt], 1)
    return {"value": len(prompt) / seconds, "seconds": seconds}


def decode_rate(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> Metrics:
    """Tokens per second after the first: the difference of a run of one token and a run of all."""
    first = timed(generate, prompts, 1)
    seconds = timed(generate, prompts, new_tokens)
    if seconds <= first:
        raise RuntimeError(f"{new_tokens} tokens took {seconds:.3f} s and one took {first:.3f} s: ask for more tokens")
    return {"value": len(prompts) * (new_tokens - 1) / (seconds - first), "ttft_s": first, "seconds": seconds}


def whole_rate(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> Metrics:
    """Tokens per second of whole requests, prompts included; also where requests go one after another."""
    seconds = timed(generate, prompts, new_tokens)
    return {"value": len(prompts) * new_tokens / seconds, "seconds": seconds}


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(make: Callable[[Task], Peer]) -> None:
    """Start the peer, then answer the orchestrator's lines on stdin until they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--new_tokens", type=int, required=True)
    args = parser.parse_args()
    # Libraries print: the answers get a descriptor of their own, and everything else goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    prompts = json.loads((args.root / "prompts.json").read_text())
    start = time.perf_counter()
    try:
        peer = make(Task(args.root, args.threads, args.new_tokens, prompts))
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(
        versions=peer.versions, rows=list(peer.rows), refused=peer.refused, notes=peer.notes,
        start_seconds=time.perf_counter() - start,
    )  # fmt: skip
    try:
        for line in sys.stdin:
            try:
                answer(metrics={**peer.rows[json.loads(line)["row"]](), "peak_mb": peak_megabytes()})
            except Exception as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
    finally:
        peer.close()


def peak_megabytes(process: int | str = "self") -> float:
    """The greatest resident size of a process so far."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"/proc/{process}/status has no VmHWM")
