"""Builds adaptrt._cuda for this machine's GPU, checks and times its kernels and its engine, and served requests.

Needs an NVIDIA GPU, nvcc, and Python packages: torch, numpy, cmake, ninja, pybind11, scikit-build-core, transformers,
peft, and those that the package itself needs. It uses no network and takes a few minutes. Each part runs in a process
with a time limit. Results go to build/gpu/report.json and report.txt after each part.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from results import Report
from subsets import ENGINE, ENGINE_TIMINGS, KERNELS, LOST_DEVICE, LOST_ENGINE, SESSION, SOAK, TIMINGS

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).resolve().parent / "check.py"
SANITIZER = "sanitizer"
# Parts in the order in which they run, with their time limits in seconds.
LIMITS = {
    KERNELS: 120,
    ENGINE: 150,
    ENGINE_TIMINGS: 240,
    TIMINGS: 120,
    SESSION: 90,
    SOAK: 330,
    LOST_DEVICE: 60,
    LOST_ENGINE: 60,
}
DEFAULT = (*(part for part in LIMITS if part != SOAK), SANITIZER)
# compute-sanitizer's tools and the part that each checks: accesses outside of memory, and races on shared memory.
SANITIZER_RUNS = (("memcheck", KERNELS), ("racecheck", KERNELS), ("memcheck", SESSION), ("memcheck", ENGINE))
SANITIZER_FOUND = 86
SANITIZER_SECONDS = 150


def main() -> int:
    """Returns 0 if the build works and every check holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", help="folder for the build and results")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--no-build", action="store_true", help="use the package of the last run")
    parser.add_argument(
        "--parts", nargs="+", choices=(*LIMITS, SANITIZER), default=DEFAULT,
        help=f"parts to run (default: all but {SOAK})",
    )  # fmt: skip
    parser.add_argument("--rows", nargs="+", default=[], help=f"rows of {ENGINE_TIMINGS}: large, small, peft, cache")
    parser.add_argument("--soak-seconds", type=float, help=f"duration of a soak (default: 20; of {SOAK}: 300)")
    parser.add_argument("--limit", type=float, default=1.0, help="factor of all time limits")
    arguments = parser.parse_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    if not arguments.no_build:
        _step("build", partial(build, arguments.build))
    environment = {**os.environ, "PYTHONPATH": str(arguments.build / "package"), "PYTHONUNBUFFERED": "1"}
    report, path, status = Report(), arguments.build / "report.json", 0
    for part in (part for part in LIMITS if part in arguments.parts):
        seconds = arguments.soak_seconds or (300.0 if part == SOAK else 20.0)
        options = ["--soak-seconds", str(seconds), *(["--rows", *arguments.rows] if arguments.rows else [])]
        limit = arguments.limit * LIMITS[part] + (seconds if part in (ENGINE, SOAK) else 0)
        found, note = _step(part, partial(check, part, options, limit, arguments.build, environment))
        report.add(found)
        report.notes.append(note)
        status = status or int(note != f"{part}: exit status 0")
        summarize(report, path)
    if SANITIZER in arguments.parts and not arguments.no_sanitizer:
        for tool, part in SANITIZER_RUNS:
            is_bad, note = _step(f"{tool} of {part}", partial(sanitize, tool, part, arguments.build, environment))
            report.notes.append(note)
            status = status or int(is_bad)
            summarize(report, path)
    print(report.text())
    return status


def build(folder: Path) -> None:
    """Installs the package into folder/package, with machine code only for this machine's GPU."""
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--target", str(package)),
        *("--config-settings", f"build-dir={folder / 'cmake'}"),
        *("--config-settings", "cmake.define.ADAPTRT_CUDA=ON"),
        *("--config-settings", "install.components=python;cuda"),
        *("--config-settings", "cmake.define.CMAKE_CUDA_ARCHITECTURES=native"),
        str(ROOT),
    ]
    subprocess.run(command, check=True)


def check(part: str, options: list[str], limit: float, folder: Path, environment: dict[str, str]) -> tuple[Report, str]:
    """Runs a part of check.py. Returns (what it found, as far as it came; a line with the result)."""
    path = folder / f"{part}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(CHECK), "--parts", part, "--report", str(path), *options]
    try:
        status = subprocess.run(command, env=environment, timeout=limit, check=False).returncode
        note = f"{part}: exit status {status}"
    except subprocess.TimeoutExpired:
        note = f"{part}: not finished after {limit:.0f} s"
    return (Report.read(path) if path.exists() else Report()), note


def sanitize(tool: str, part: str, folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Runs compute-sanitizer. Returns (True if it found a problem, a line with the result)."""
    name = f"{tool}-{part}"
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        return False, f"{name}: not run, there is no compute-sanitizer on this machine"
    log = folder / f"{name}.log"
    command = [
        *(sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), "--log-file", str(log)),
        # Some checks make CUDA calls fail on purpose.
        *("--report-api-errors", "no"),
        # Excludes torch's own kernels from the check.
        *("--kernel-name", "kernel_substring=kernel_entry"),
        *(sys.executable, str(CHECK), "--parts", part, "--few", "--report", str(folder / f"{name}.json")),
    ]
    if part == KERNELS:
        # Freed memory is returned at once, so that the memory after a tensor is not another tensor's. A session's
        # captured steps may not allocate.
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        status = subprocess.run(command, env=environment, timeout=SANITIZER_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return False, f"{name}: not finished after {SANITIZER_SECONDS} s"
    text = log.read_text() if log.exists() else ""
    if "not supported" in text.lower():
        return False, f"{name}: not run, compute-sanitizer does not support this machine (see {log.name})"
    if status == 0:
        return False, f"{name}: nothing found"
    return True, f"{name}: exit status {status}, see {log.name}"


def summarize(report: Report, path: Path) -> None:
    """Writes what the parts have found so far, as JSON and as text."""
    report.write(path)
    path.with_suffix(".txt").write_text(report.text() + "\n")


def _step(name: str, work: Callable[[], T]) -> T:
    print(f"== {name}", flush=True)
    begin = time.monotonic()
    result = work()
    print(f"== {name} took {time.monotonic() - begin:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
