"""The checks that tests/gpu runs on a GPU also pass on the emulated device and kernels, so the checks are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import adaptrt_cuda_emulated
import pytest

from support.processes import python_path

CHECK = Path(__file__).resolve().parents[2] / "gpu" / "check.py"


def run_check(report: Path, *arguments: str) -> Any:
    """Runs check.py with the emulated kernels; returns its report. Fails if a check fails."""
    emulated = Path(adaptrt_cuda_emulated.__file__).parent
    command = [sys.executable, str(CHECK), "--emulated", "--report", str(report), *arguments]
    status = subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path(emulated)}, check=False).returncode
    found = json.loads(report.read_text())
    failed = [check for check in found["checks"] if not check["passed"]]
    assert failed == []
    assert status == 0
    return found


# tests/cpp/cuda compares the same kernels with float64. But a GPU is rarely there to show that these checks are right.
@pytest.mark.slow
def test_the_gpus_checks_hold_for_the_emulated_kernels(tmp_path: Path) -> None:
    checks = run_check(tmp_path / "report.json", "--parts", "kernels", "session")["checks"]
    groups = {check["name"].split()[0] for check in checks}
    assert groups == {
        "lora",
        "attention",
        "product",
        "experts",
        "sparse",
        "rows",
        "states",
        "latent",
        "vocabulary",
        "device:",
        "session",
    }


# test_cuda_emulated.py serves requests with the same engine, and "engine-timings" runs most of the same scripts.
@pytest.mark.nightly
def test_the_gpus_checks_hold_for_the_emulated_engine(tmp_path: Path) -> None:
    checks = run_check(tmp_path / "report.json", "--parts", "engine", "soak", "--soak-seconds", "2")["checks"]
    assert {check["name"].split()[0] for check in checks} == {"engine", "engine:"}


@pytest.mark.slow
def test_the_engines_timings_run_with_emulated_kernels(tmp_path: Path) -> None:
    rows = run_check(tmp_path / "report.json", "--parts", "engine-timings")["rows"]
    names = [row["name"] for row in rows]
    assert [name for name in names if name.startswith("part")] == [
        "part large",
        "part small",
        "part peft",
        "part cache",
    ]
    # Times mean nothing here, but each row with a target has what it is compared with.
    assert all(row["limit"] > 0 and row["share"] > 0 for row in rows if row["target"])
