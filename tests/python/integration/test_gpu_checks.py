"""The checks that tests/gpu runs on a GPU also pass on the emulated device and kernels, so the checks are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import adaptrt_cuda_emulated
import pytest

from support.processes import python_path

CHECK = Path(__file__).resolve().parents[2] / "gpu" / "check.py"


@pytest.mark.slow
def test_the_gpus_checks_hold_for_the_emulated_kernels(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    emulated = Path(adaptrt_cuda_emulated.__file__).parent
    command = [sys.executable, str(CHECK), "--emulated", "--report", str(report)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path(emulated)}, check=True)
    checks = json.loads(report.read_text())["checks"]
    groups = {check["name"].split()[0] for check in checks}
    assert groups == {"lora", "attention", "product", "rows", "device:", "session"}
