"""Checks the engines of make_references.py with the kernels of this CPU, which should be a 64-bit Arm one.

    python tests/arm/check_references.py build/arm-references

Needs the package alone. Exits with a nonzero status if an answer is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from cases import ADAPTERS, USES_C_LIBRARY, Answer, ask

from adaptrt import _core

# A share of the range of the logits, as in tests/python/integration/test_families.py.
FLOAT32_TOLERANCE = 1e-4
# Tables that give the same bits (docs/decisions/kernels.md).
SAME_BITS = ("neon", "neon_dotprod", "neon_i8mm")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print("kernels:", ", ".join(_core.cpu_kernels()), flush=True)
    problems = []
    families = sorted(path.parent for path in folder.glob("*/expected.npz"))
    for family in families:
        begin = time.monotonic()
        found = FamilyCheck(family).problems()
        print(f"{family.name}: {'; '.join(found) or 'right'} ({time.monotonic() - begin:.0f} s)", flush=True)
        problems += found
    if not families:
        problems.append(f"{folder} has no references")
        print(problems[0], file=sys.stderr)
    return 1 if problems else 0


class FamilyCheck:
    """The engines of one family."""

    def __init__(self, folder: Path) -> None:
        """Reads the expected answers of the folder."""
        self._folder = folder
        with np.load(folder / "expected.npz") as file:
            self._expected = dict(file)
        # Machines have different C libraries.
        self._is_inexact = (folder / USES_C_LIBRARY).exists()
        self._vocab_size = int(self._expected.pop("vocab_size"))

    def problems(self) -> list[str]:
        """Returns a sentence for each wrong answer."""
        engines = dict.fromkeys(key.split("/")[0] for key in self._expected)
        return [problem for engine in engines for problem in self._engine_problems(engine)]

    def _engine_problems(self, engine: str) -> list[str]:
        crowd = {"enable_chunked_context": True, "max_num_tokens": 16, "num_threads": 3}
        tables = [name for name in _core.cpu_kernels() if name != "portable"]
        # All of a family's engines run on the fastest table; one with several engines runs on all tables.
        has_several = len({key.split("/")[0] for key in self._expected}) > 1
        answers = {
            name: self._ask(engine, True, kernels=name, **crowd) for name in (tables if has_several else tables[:1])
        }
        problems = []
        for name, found in answers.items():
            problems += self._far_from_transformers(engine, name, found)
            if not same(found, self._ask(engine, False, kernels=name, num_threads=1)):
                problems.append(f"{engine}, {name}: a crowd changes bits")
        shared = [answers[name] for name in SAME_BITS if name in answers]
        if not all(same(shared[0], others) for others in shared[1:]):
            problems.append(f"{engine}: {', '.join(SAME_BITS)} give different bits")
        portable = self._ask(engine, True, kernels="portable", **crowd)
        for name, answer in zip(ADAPTERS, portable, strict=True):
            expected = self._expected[f"{engine}/portable/{name}"]
            if self._is_inexact and range_error(answer, expected) <= FLOAT32_TOLERANCE:
                continue
            if answer.logits.tobytes() != expected.tobytes():
                problems.append(f"{engine}, {name}: portable kernels give other bits than on the machine that built it")
        return problems

    def _ask(self, engine: str, together: bool, **fields: object) -> list[Answer]:
        return ask(self._folder, engine, self._vocab_size, together, **fields)

    def _far_from_transformers(self, engine: str, table: str, answers: list[Answer]) -> list[str]:
        problems = []
        for name, answer in zip(ADAPTERS, answers, strict=True):
            expected = self._expected.get(f"{engine}/transformers/{name}")
            if expected is None:
                continue
            error = range_error(answer, expected)
            first = len(expected) - len(answer.tokens)
            if not error <= FLOAT32_TOLERANCE or answer.tokens != expected[first:].argmax(axis=1).tolist():
                problems.append(f"{engine}, {table}, {name}: {error:.2g} of the range from transformers")
        return problems


def range_error(answer: Answer, expected: np.ndarray) -> float:
    """The largest error of the logits, divided by their range."""
    return float(np.abs(answer.logits - expected).max() / (expected.max() - expected.min()))


def same(some: list[Answer], others: list[Answer]) -> bool:
    """True if all answers are equal bit for bit."""
    return all(one.same_bits(other) for one, other in zip(some, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
