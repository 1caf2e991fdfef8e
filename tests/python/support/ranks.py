"""Engines of several ranks, run by the processes that mpirun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_TESTS = Path(__file__).parents[1]
_NOTHING = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class RankAnswer:
    """What one request gave; no logits where it did not ask for them."""

    tokens: list[int]
    context_logits: np.ndarray
    generation_logits: np.ndarray

    def same_bits(self, other: RankAnswer) -> bool:
        """Tokens and logits."""
        return self.tokens == other.tokens and all(
            mine.tobytes() == theirs.tobytes()
            for mine, theirs in (
                (self.context_logits, other.context_logits),
                (self.generation_logits, other.generation_logits),
            )
        )


def say(*words: object) -> None:
    """Prints a line in one write: print() makes several where PYTHONUNBUFFERED is set, and mpirun mixes them."""
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


def start_ranks(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    """Starts Python with these arguments as so many processes."""
    command = [Path(sys.executable).with_name("mpirun"), "-n", ranks, sys.executable, *arguments]
    return subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mpirun(
    ranks: int, *arguments: object, check: bool = True, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments as so many processes, to their end."""
    with start_ranks(ranks, *arguments) as running:
        try:
            stdout, stderr = running.communicate(timeout=timeout)
        finally:
            running.kill()
    done = subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def answers_of_ranks(
    ranks: int, engine: Path, batches: list[list[dict[str, Any]]], place: Path, **config: Any
) -> list[list[RankAnswer]]:
    """What rank_script.py's batches give; `place` is a directory for its files."""
    spec, output = place / "spec.json", place / "answers.npz"
    spec.write_text(json.dumps({"engine": str(engine), "config": config, "batches": batches}))
    mpirun(ranks, "-m", "support.rank_script", spec, output)
    return answers_of(np.load(output), batches)


def answers_of(found: Mapping[str, np.ndarray], batches: list[list[dict[str, Any]]]) -> list[list[RankAnswer]]:
    """What rank_script.py's arrays are of."""
    return [
        [
            RankAnswer(
                found[f"{number}.{at}.tokens"].tolist(),
                found.get(f"{number}.{at}.context", _NOTHING),
                found.get(f"{number}.{at}.generation", _NOTHING),
            )
            for at in range(len(batch))
        ]
        for number, batch in enumerate(batches)
    ]
