"""Checks and times the kernels of adaptrt._cuda in this process; run.py calls it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from attention_checks import attention_checks
from attention_timings import attention_timings
from lora_checks import lora_checks
from lora_timings import lora_timings
from machine import Machine
from rates import measure_rates
from results import Check, Report

# What the session's checks share with the tests: models, adapters, requests.
SUPPORT = Path(__file__).resolve().parents[1] / "python"


def main() -> int:
    """0 when every check holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="file for the results, as JSON")
    parser.add_argument("--subset", action="store_true", help="few and small checks of kernels, no timings")
    parser.add_argument("--emulated", action="store_true", help="the emulated kernels on the host; few, no timings")
    arguments = parser.parse_args()
    machine = Machine.emulated() if arguments.emulated else Machine.gpu()
    subset = arguments.subset or arguments.emulated
    report = Report(machine=_describe(machine))
    _take(report, "lora", lora_checks(machine, subset=subset))
    _take(report, "attention", attention_checks(machine, subset=subset))
    if not arguments.subset:
        _take(report, "session", _session_checks(machine, subset=subset))
    report.write(arguments.report)
    if not subset:
        report.rates = measure_rates(machine)
        report.timings += lora_timings(machine, report.rates)
        report.timings += attention_timings(machine, report.rates)
        report.write(arguments.report)
    print(report.text())
    return 1 if report.failed else 0


def _session_checks(machine: Machine, *, subset: bool) -> Iterable[Check]:
    """Those of session_checks.py, whose imports need more than the kernels' checks do."""
    sys.path.append(str(SUPPORT))
    try:
        session = importlib.import_module("session_checks")
    except ImportError as error:
        return [Check("session: all checks ran", False, str(error))]
    checks: Iterable[Check] = session.session_checks(machine, subset=subset)
    return checks


def _take(report: Report, what: str, checks: Iterable[Check]) -> None:
    """Adds the checks; one that raises is a failure of what it belongs to, and the last of it."""
    try:
        for check in checks:
            report.checks.append(check)
            if not check.passed:
                print(f"FAILED {check.name}: {check.detail}", flush=True)
    except (RuntimeError, ValueError) as error:
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
