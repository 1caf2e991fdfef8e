"""Builds adaptrt._cuda for this machine's GPU, checks and times its kernels and requests served with them.

Needs an NVIDIA GPU, nvcc, and Python packages: torch, numpy, cmake, ninja, pybind11, scikit-build-core, transformers,
peft, and those that the package itself needs. It uses no network and takes a few minutes. Results go to
build/gpu/report.json and report.txt.
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
from subsets import KERNELS, LOST_DEVICE, SESSION

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).resolve().parent / "check.py"
# compute-sanitizer's tools and the subset of checks for each: accesses outside of memory, and races on shared memory.
SANITIZER_RUNS = (("memcheck", KERNELS), ("racecheck", KERNELS), ("memcheck", SESSION))
SANITIZER_FOUND = 86
SANITIZER_SECONDS = 150
LOSS_SECONDS = 60


def main() -> int:
    """Returns 0 if the build works and every check holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", help="folder for the build and results")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--no-build", action="store_true", help="use the package of the last run")
    arguments = parser.parse_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    if not arguments.no_build:
        _step("build", partial(build, arguments.build))
    report = arguments.build / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(arguments.build / "package")}
    status = _step("checks and timings", partial(check, report, environment))
    notes = [f"checks and timings: exit status {status}"]
    found, note = _step("a lost device", partial(lose_device, arguments.build, environment))
    notes.append(note)
    status = status or int(found)
    if not arguments.no_sanitizer:
        for tool, subset in SANITIZER_RUNS:
            found, note = _step(f"{tool} of {subset}", partial(sanitize, tool, subset, arguments.build, environment))
            notes.append(note)
            status = status or int(found)
    summarize(report, notes)
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


def check(report: Path, environment: dict[str, str]) -> int:
    """Runs check.py, which writes `report`; returns its exit status."""
    report.unlink(missing_ok=True)
    return subprocess.run(
        [sys.executable, str(CHECK), "--report", str(report)], env=environment, check=False
    ).returncode


def lose_device(folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Loses the device in a separate process. Returns (True if that is handled badly, a line with the result)."""
    command = [sys.executable, str(CHECK), "--subset", LOST_DEVICE, "--report", str(folder / f"{LOST_DEVICE}.json")]
    try:
        status = subprocess.run(command, env=environment, timeout=LOSS_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return True, f"{LOST_DEVICE}: not finished after {LOSS_SECONDS} s"
    return status != 0, f"{LOST_DEVICE}: exit status {status}"


def sanitize(tool: str, subset: str, folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Runs compute-sanitizer. Returns (True if it found a problem, a line with the result)."""
    name = f"{tool}-{subset}"
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
        *(sys.executable, str(CHECK), "--subset", subset, "--report", str(folder / f"{name}.json")),
    ]
    if subset == KERNELS:
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


def summarize(path: Path, notes: list[str]) -> None:
    """Adds the notes to check.py's report, which is empty if check.py crashed, and writes it as text next to it."""
    report = Report.read(path) if path.exists() else Report()
    report.notes = notes
    report.write(path)
    path.with_suffix(".txt").write_text(report.text() + "\n")
    print(report.text())


def _step(name: str, work: Callable[[], T]) -> T:
    print(f"== {name}", flush=True)
    begin = time.monotonic()
    result = work()
    print(f"== {name} took {time.monotonic() - begin:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
