"""Puts faults into source files, one at a time, runs the nearest tests, and lists the faults that no test finds.

    .venv/bin/python tests/mutation/run.py --since main                   # the lines of a change
    .venv/bin/python tests/mutation/run.py --count 40 cpp/src/sched       # 40 faults anywhere in these files
    .venv/bin/python tests/mutation/run.py --again build/mutation/report.jsonl    # those that were not found before

It works in a copy of the tree, build/mutation/. A fault is found if a test fails, crashes or does not end. A fault that
does not build does not count. A surviving fault means a missing test, or a change without visible effect.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from faults import Fault, find_faults
from nearest import stages_of
from workspace import ROOT, BuildError, Ending, Workspace

SOURCES = (
    "cpp/src",
    "cpp/include",
    "cpp/bindings",
    "builder",
    "common",
    "formats",
    "runtime",
    "plugins",
    "serve",
    "tools",
)
FOLDER = ROOT / "build" / "mutation"
SURVIVED = "survived"
NO_BUILD = "does not build"


def main() -> int:
    """Returns 0 if every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders; default: all sources")
    parser.add_argument("--since", metavar="COMMIT", help="only lines changed since this commit")
    parser.add_argument("--again", type=Path, metavar="REPORT", help="only the surviving faults of a report")
    parser.add_argument("--count", type=int, help="number of faults, spread over the files; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--prefix", default="", help="command put before builds and tests, for example 'nice'")
    parser.add_argument(
        "--report", type=Path, default=FOLDER / "report.jsonl", help="file for the results: one line of JSON per fault"
    )
    arguments = parser.parse_args()
    if arguments.again is not None:
        faults = survivors_of(arguments.again)
    else:
        lines = None if arguments.since is None else changed_lines(arguments.since)
        files = source_files(arguments.paths or SOURCES)
        faults = chosen([list(faults_of(file, lines)) for file in files], arguments.count, arguments.seed)
    workspace = Workspace(FOLDER, shlex.split(arguments.prefix))
    outcomes = []
    with arguments.report.open("w") as report:
        for number, fault in enumerate(faults, 1):
            outcome = outcome_of(fault, workspace)
            outcomes.append((fault, outcome))
            report.write(json.dumps({**asdict(fault), "outcome": outcome}) + "\n")
            report.flush()
            print(f"[{number}/{len(faults)}] {fault.shown_in(workspace.text(fault.path))}\n    {outcome}", flush=True)
    return summarize(outcomes, workspace)


def outcome_of(fault: Fault, workspace: Workspace) -> str:
    """Name of the tests that found the fault or did not end with it, or SURVIVED or NO_BUILD."""
    for stage in stages_of(fault.path, workspace.tree / "tests" / "python"):
        workspace.try_without_fault(stage)
        with workspace.fault(fault):
            try:
                ending = workspace.ending_of(stage)
            except BuildError:
                return NO_BUILD
        if ending is Ending.FAILED:
            return f"found by {stage}"
        if ending is Ending.NEVER_ENDED:
            return f"never ends in {stage}"
    return SURVIVED


def source_files(paths: Iterable[str]) -> list[str]:
    """C++ and Python files of the repository under these paths, without CUDA sources."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    names = (name for name in listed.stdout.splitlines() if name.startswith(SOURCES) and "/cuda/" not in name)
    return [name for name in names if re.fullmatch(r"cpp/.*\.(cpp|h|inl)|.*\.py", name)]


def changed_lines(commit: str) -> dict[str, set[int]]:
    """Lines added since a commit, by file."""
    diff = subprocess.run(
        ["git", "diff", "--unified=0", "--no-prefix", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    lines: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ")
        elif found := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return lines


def faults_of(path: str, lines: dict[str, set[int]] | None) -> Iterable[Fault]:
    """Faults of a file, or of the given lines."""
    for fault in find_faults(path, (ROOT / path).read_text()):
        if lines is None or fault.line in lines.get(path, ()):
            yield fault


def chosen(faults_of_files: list[list[Fault]], count: int | None, seed: int) -> list[Fault]:
    """Selects `count` faults, from each file in turn. Faults of one file stay together, so that builds are
    incremental."""
    choice = random.Random(seed)
    for faults in faults_of_files:
        choice.shuffle(faults)
    choice.shuffle(faults_of_files)
    turns = max(map(len, faults_of_files), default=0)
    dealt = [faults[turn] for turn in range(turns) for faults in faults_of_files if turn < len(faults)]
    return sorted(dealt[:count])


def survivors_of(report: Path) -> list[Fault]:
    """Faults that an earlier run did not find."""
    entries = [json.loads(line) for line in report.read_text().splitlines()]
    return [
        Fault(**{name: value for name, value in entry.items() if name != "outcome"})
        for entry in entries
        if entry["outcome"] == SURVIVED
    ]


def summarize(outcomes: list[tuple[Fault, str]], workspace: Workspace) -> int:
    """Prints the surviving faults and the score."""
    survivors = [fault for fault, outcome in outcomes if outcome == SURVIVED]
    num_built = sum(outcome != NO_BUILD for _, outcome in outcomes)
    print(f"\n{num_built - len(survivors)} of {num_built} faults found; {len(outcomes) - num_built} did not build")
    for stage, count in Counter(outcome for _, outcome in outcomes).most_common():
        print(f"  {count:4} {stage}")
    for fault in survivors:
        print(fault.shown_in(workspace.text(fault.path)))
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
