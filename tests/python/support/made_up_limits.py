"""`adaptrt bench` with made-up limits of the machine: python -m support.made_up_limits ENGINE FLAGS...

Measuring the limits reads a gigabyte several times, for each bench. test_bench.py measures them.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from adaptrt.builder.cli import main
from adaptrt.tools.bench import limits


def made_up_limits(num_threads: int, rounds: int) -> SimpleNamespace:
    """Replaces measure_machine_limits."""
    return SimpleNamespace(**dict.fromkeys(limits.LIMIT_UNITS, 1e10))


if __name__ == "__main__":
    limits.measure_machine_limits = made_up_limits
    sys.exit(main(["bench", *sys.argv[1:]]))
