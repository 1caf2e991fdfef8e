"""Checks and times adaptrt._cuda in this process: its kernels, and requests served with them. Called by run.py."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from attention_checks import attention_checks
from attention_timings import attention_timings
from lora_checks import lora_checks
from lora_timings import lora_timings
from machine import Machine
from product_checks import product_checks
from product_timings import product_timings
from rates import measure_rates
from results import Check, Report
from subsets import KERNELS, LOST_DEVICE, SESSION

# Models, adapters and requests that the session's checks share with the tests.
SUPPORT = Path(__file__).resolve().parents[1] / "python"


def main() -> int:
    """Returns 0 if every check holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="file for the results, as JSON")
    parser.add_argument(
        "--subset", choices=(KERNELS, SESSION, LOST_DEVICE), help="only few of these checks, and no timings"
    )
    parser.add_argument("--emulated", action="store_true", help="few checks of the emulated kernels on the host")
    arguments = parser.parse_args()
    machine = Machine.emulated() if arguments.emulated else Machine.gpu()
    few = arguments.emulated or arguments.subset is not None
    report = Report(machine=_describe(machine))
    if arguments.subset in (None, KERNELS):
        _take(report, "lora", lora_checks(machine, subset=few))
        _take(report, "attention", attention_checks(machine, subset=few))
        _take(report, "product", product_checks(machine, subset=few))
    if arguments.subset in (None, SESSION):
        _take(report, "session", _of_session(lambda module: module.session_checks(machine, subset=few)))
    if arguments.subset == LOST_DEVICE:
        _take(report, "lost device", _of_session(lambda module: module.lost_device_checks(machine)))
    report.write(arguments.report)
    if not few:
        report.rates = measure_rates(machine)
        report.timings += lora_timings(machine, report.rates)
        report.timings += attention_timings(machine, report.rates)
        report.timings += product_timings(machine, report.rates)
        report.write(arguments.report)
    print(report.text())
    return 1 if report.failed else 0


def _of_session(checks: Callable[[Any], Iterable[Check]]) -> Iterable[Check]:
    """Returns checks of session_checks.py, whose imports need more packages than the kernels' checks."""
    sys.path.append(str(SUPPORT))
    try:
        return checks(importlib.import_module("session_checks"))
    except ImportError as error:
        return [Check("session: all checks ran", False, str(error))]


def _take(report: Report, what: str, checks: Iterable[Check]) -> None:
    """Adds the checks. A check that raises counts as failed and ends its group."""
    try:
        for check in checks:
            report.checks.append(check)
            if not check.passed:
                print(f"FAILED {check.name}: {check.detail}", flush=True)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        report.checks.append(Check(f"{what}: all checks ran", False, str(error)))


def _describe(machine: Machine) -> dict[str, object]:
    described: dict[str, object] = {"torch": torch.__version__, "device": "the host, emulated"}
    if machine.is_gpu:
        properties = torch.cuda.get_device_properties(machine.device)
        described["device"] = properties.name
        described["compute_capability"] = f"{properties.major}.{properties.minor}"
        described["multiprocessors"] = properties.multi_processor_count
        described["memory_bytes"] = properties.total_memory
    return described


if __name__ == "__main__":
    sys.exit(main())
