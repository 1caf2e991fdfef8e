"""Engines of several ranks, run by the processes that mpirun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .processes import python_path
from .rank_script import answer
from .watched import Watched, watched

EngineRun = tuple[Path, list[list[dict[str, Any]]], dict[str, Any]]
"""An engine, batches of cases, and fields of ExecutorConfig."""

_TESTS = Path(__file__).parents[1]
_NOTHING = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class RankAnswer:
    """Answer to one request; without logits if it did not ask for them."""

    tokens: list[int]
    context_logits: np.ndarray
    generation_logits: np.ndarray

    def same_bits(self, other: RankAnswer) -> bool:
        """True if tokens and logits are equal bit for bit."""
        return self.tokens == other.tokens and all(
            mine.tobytes() == theirs.tobytes()
            for mine, theirs in (
                (self.context_logits, other.context_logits),
                (self.generation_logits, other.generation_logits),
            )
        )


def say(*words: object) -> None:
    """Prints a line in one write. With PYTHONUNBUFFERED, print() makes several writes, which mpirun mixes."""
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


def ranks_of(ranks: int, *arguments: object) -> AbstractContextManager[Watched]:
    """Starts Python with these arguments in `ranks` processes."""
    command = [Path(sys.executable).with_name("mpirun"), "-n", ranks, sys.executable, *arguments]
    return watched(command, env={"PYTHONPATH": python_path(_TESTS)}, stderr=subprocess.PIPE)


def mpirun(ranks: int, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in `ranks` processes, until they end."""
    with ranks_of(ranks, *arguments) as running:
        stdout, stderr = running.communicate()
    done = subprocess.CompletedProcess(running.process.args, running.process.returncode, stdout, stderr)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def answers_of_ranks(
    ranks: int, engine: Path, batches: list[list[dict[str, Any]]], place: Path, **config: Any
) -> list[list[RankAnswer]]:
    """Returns the answers of rank_script.py. place: directory for its files."""
    (answers,) = answers_of_engines(ranks, [(engine, batches)], place, **config)
    return answers


def answers_of_engines(
    ranks: int, engines: list[tuple[Path, list[list[dict[str, Any]]]]], place: Path, **config: Any
) -> list[list[list[RankAnswer]]]:
    """Like answers_of_ranks, for several engines with their batches, in the same processes."""
    return answers_of_runs(ranks, [(engine, batches, config) for engine, batches in engines], place)


def answers_of_runs(ranks: int, runs: Sequence[EngineRun], place: Path) -> list[list[list[RankAnswer]]]:
    """Like answers_of_engines, for runs with a config each.

    All ranks run one engine after the other, because starting them takes longer than the work. One rank is this
    process.
    """
    specs = [
        {"engine": str(engine), "config": config, "batches": batches, "output": str(place / f"answers{number}.npz")}
        for number, (engine, batches, config) in enumerate(runs)
    ]
    if ranks == 1:
        for spec in specs:
            answer(spec)
    else:
        (place / "specs.json").write_text(json.dumps(specs))
        mpirun(ranks, "-m", "support.rank_script", place / "specs.json")
    return [answers_of(np.load(spec["output"]), spec["batches"]) for spec in specs]


def answers_of(found: Mapping[str, np.ndarray], batches: list[list[dict[str, Any]]]) -> list[list[RankAnswer]]:
    """Converts rank_script.py's arrays to answers."""
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
