"""Shared code of all peers' processes: the rows, the computation of rates, and the protocol with the orchestrator.

It runs in the peer's own virtual environment, so it needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

BATCH = 16
MIXED_TOKENS = 24
"""Maximum new tokens of a request in rows with several adapters, for all peers: some peers are very slow there."""
ADAPTER_OF_ONE = 1  # Rank 16.
WARM_UP_TOKENS = 2
PROMPTS = 3
"""Number of prompts of a prefill sample, timed one after another."""
UNCOUNTED = 512
"""Maximum number of tokens of the prompt that is computed before them and not counted."""
CONTEXT = 8448
"""Maximum tokens of a request, prompt and answer."""
STEP_TOKENS = 1024
"""Prompt tokens per step, for peers that can limit them: a longer prompt is chunked."""
GGUF = ("q8_0", "q4_k_m")
"""Types of GGUF files, made by llama.cpp's quantiser, that AdaptRT and llama.cpp both read."""
Metrics = dict[str, float]


@dataclass
class Task:
    """Input of all peers: the model's directory and its prompts."""

    root: Path
    threads: int
    prompts: dict[str, list[list[int]]]

    @property
    def base(self) -> Path:
        """The Hugging Face directory."""
        return self.root / "base"

    @property
    def loras(self) -> list[Path]:
        """PEFT directories of the 16 LoRA adapters, with ranks 8, 16, 32 and 64 in turn."""
        return [self.root / "adapters" / f"lora{index:02d}" for index in range(BATCH)]

    @property
    def doras(self) -> list[Path]:
        """PEFT directories of the 8 DoRA adapters, with the ranks of the first 8 LoRA adapters."""
        return [self.root / "adapters" / f"dora{index:02d}" for index in range(BATCH // 2)]

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

    @property
    def longest(self) -> list[int]:
        """One prompt of 8192 tokens."""
        return self.prompts["longest"][0]


class Variant(Protocol):
    """The model with one kind of weights, loaded and ready."""

    def generate(self, prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> Sequence[Sequence[int]]:
        """Runs the batch to its end and returns the tokens of each prompt."""

    def close(self) -> None:
        """Frees it."""


@dataclass(frozen=True)
class Row:
    """How a peer measures a row."""

    variant: str
    """Variant of the weights; loaded when the first row with it is warmed up or measured."""
    measure: Callable[[Any, int], Metrics]
    """Arguments: the loaded variant, and the number of new tokens per request."""
    warm_up: Callable[[Any], object] = lambda variant: None


@dataclass
class Peer:
    """Result of a peer's script: how it measures each row, or the reason why it does not."""

    versions: dict[str, str]
    load: Callable[[str], Variant]
    """Loads a variant by name."""
    rows: dict[str, Row]
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


Generate = Callable[[Sequence[list[int]], int], Sequence[Sequence[int]]]
"""generate(prompts, new tokens): runs the batch to its end and returns the tokens of each prompt."""


def timed(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Returns the seconds that a batch takes. Raises RuntimeError unless every prompt got all of its tokens."""
    start = time.perf_counter()
    answers = generate(prompts, new_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [new_tokens] * len(prompts):
        raise RuntimeError(f"asked for {new_tokens} tokens for each of {len(prompts)} prompts, got {lengths}")
    return seconds


def prefill_rate(generate: Generate, prompt: list[int], times: int) -> Metrics:
    """Prompt tokens per second, from the median of several times to first token.

    An uncounted run comes first, because the process was stopped and other processes used the CPU's caches.
    """
    timed(generate, [prompt[:UNCOUNTED]], 1)
    seconds = statistics.median(timed(generate, [prompt], 1) for _ in range(times))
    return {"value": len(prompt) / seconds, "seconds": seconds}


def decode_rate(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> Metrics:
    """Tokens per second after the first token: the difference between a run of all tokens and a run of one token."""
    first = timed(generate, prompts, 1)
    seconds = timed(generate, prompts, new_tokens)
    if seconds <= first:
        raise RuntimeError(f"{new_tokens} tokens took {seconds:.3f} s and one took {first:.3f} s: ask for more tokens")
    return {"value": len(prompts) * (new_tokens - 1) / (seconds - first), "ttft_s": first, "seconds": seconds}


def prefill_row(variant: str, prompt: list[int], *, times: int = PROMPTS, **options: Any) -> Row:
    """A row of prefill_rate; `options` are passed to generate."""

    def measure(loaded: Variant, new_tokens: int) -> Metrics:
        return prefill_rate(partial(loaded.generate, **options), prompt, times)

    return Row(variant, measure, lambda loaded: loaded.generate([prompt], 1, **options))


def decode_row(variant: str, prompts: Sequence[list[int]], *, most_tokens: int | None = None, **options: Any) -> Row:
    """A row of decode_rate; `options` are passed to generate. `most_tokens` limits the tokens of each request."""

    def measure(loaded: Variant, new_tokens: int) -> Metrics:
        tokens = new_tokens if most_tokens is None else min(most_tokens, new_tokens)
        return decode_rate(partial(loaded.generate, **options), prompts, tokens)

    return Row(variant, measure, lambda loaded: loaded.generate(prompts, WARM_UP_TOKENS, **options))


def base_rows(task: Task, variant: str, prefix: str = "") -> dict[str, Row]:
    """The rows without adapters."""
    return {
        f"{prefix}prefill-512": prefill_row(variant, task.long),
        f"{prefix}decode-1": decode_row(variant, task.alone),
        f"{prefix}decode-16": decode_row(variant, task.batch),
    }


def gguf_rows(task: Task) -> dict[str, Row]:
    """The rows of peers that read GGUF files. Variants have the name of the file's type, with `-adapters` behind it if
    all adapters are loaded."""
    rows: dict[str, Row] = {}
    for kind in GGUF:
        rows |= base_rows(task, kind, f"{kind}-")
        rows[f"{kind}-mixed-16"] = decode_row(
            f"{kind}-adapters", task.batch, most_tokens=MIXED_TOKENS, adapters=list(range(BATCH))
        )
    return rows


def long_prompt_row(task: Task, variant: str) -> dict[str, Row]:
    """The row of a prompt that takes seconds, timed once."""
    return {"prefill-8192": prefill_row(variant, task.longest, times=1)}


def long_decode_row(task: Task, variant: str) -> dict[str, Row]:
    """The row of an answer to a long prompt. Its variant keeps the prompt's keys and values from the warm-up on."""
    return {"decode-8192": decode_row(variant, [task.longest], most_tokens=MIXED_TOKENS)}


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Measurer:
    """A peer and its loaded variants."""

    def __init__(self, peer: Peer, new_tokens: int) -> None:
        self._peer = peer
        self._new_tokens = new_tokens
        self._loaded: dict[str, Variant] = {}

    def answer(self, row: str, *, warm_up: bool) -> dict[str, Any]:
        """Answers one line of the orchestrator. Raises any error of the peer."""
        wanted = self._peer.rows[row]
        seconds = 0.0
        if wanted.variant not in self._loaded:
            start = time.perf_counter()
            self._loaded[wanted.variant] = self._peer.load(wanted.variant)
            seconds = time.perf_counter() - start
        variant = self._loaded[wanted.variant]
        if warm_up:
            wanted.warm_up(variant)
            return {"load_seconds": seconds}
        return {"metrics": {**wanted.measure(variant, self._new_tokens), "peak_mb": peak_megabytes()}}

    def close(self) -> None:
        """Ends the variants."""
        for variant in self._loaded.values():
            variant.close()


def main(make: Callable[[Task], Peer]) -> None:
    """Starts the peer, then answers the orchestrator's lines on stdin until they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--new_tokens", type=int, required=True)
    args = parser.parse_args()
    # Libraries print to stdout, so answers get their own descriptor, and all other output goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    prompts = json.loads((args.root / "prompts.json").read_text())
    try:
        peer = make(Task(args.root, args.threads, prompts))
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(versions=peer.versions, rows=list(peer.rows), refused=peer.refused, notes=peer.notes)
    measurer = Measurer(peer, args.new_tokens)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer(**measurer.answer(asked["row"], warm_up=asked["warm_up"]))
            except Exception as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
    finally:
        measurer.close()


def peak_megabytes() -> float:
    """Peak resident size of this process, plus that of its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sum(map(_peak_megabytes, ("self", *children)))


def _peak_megabytes(process: str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"/proc/{process}/status has no VmHWM")
