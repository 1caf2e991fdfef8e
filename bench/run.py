"""Measures AdaptRT without peers: `python bench/run.py [SCENARIOS] [flags]`, with the package installed. See
README.md."""

from __future__ import annotations

import sys

from adaptrt.builder.cli import run_command
from scenarios import command

if __name__ == "__main__":
    summary = "Measure AdaptRT's own scenarios, compared with the machine's limits"
    sys.exit(run_command(command, sys.argv[1:], prog="bench/run.py", description=summary))
