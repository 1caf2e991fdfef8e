"""Checks and times adaptrt._cuda in this process. Called by run.py, which runs each part in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from attention_checks import attention_checks
from attention_timings import attention_timings
from expert_checks import expert_checks
from latent_checks import latent_checks
from lora_checks import lora_checks
from lora_timings import lora_timings
from machine import Machine
from product_checks import product_checks
from product_timings import product_timings
from quantized_product_checks import quantized_product_checks
from rates import measure_rates
from results import Check, Report, Row, Timing, row_cells
from row_checks import row_checks
from sparse_checks import sparse_checks
from sparse_timings import sparse_timings
from state_checks import state_checks
from subsets import ALL, ENGINE, ENGINE_TIMINGS, KERNELS, LOST_DEVICE, LOST_ENGINE, SESSION, SOAK, TIMINGS
from vocabulary_checks import vocabulary_checks

# Models, adapters and requests that the checks of served requests share with the tests.
SUPPORT = Path(__file__).resolve().parents[1] / "python"
# Limits of emulated kernels, which mean nothing.
_EMULATED_RATES = {"bytes_per_second": 1e9, "flops_per_second": 1e10}


def main() -> int:
    """Returns 0 if every check holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="file for the results, as JSON")
    parser.add_argument("--parts", choices=ALL, nargs="+", help="only these parts; default: all checks and timings")
    parser.add_argument("--few", action="store_true", help="few checks of each part")
    parser.add_argument("--emulated", action="store_true", help="few checks of the emulated kernels on the host")
    parser.add_argument("--rows", nargs="+", default=[], help="parts of engine-timings: large, small, peft, cache")
    parser.add_argument("--soak-seconds", type=float, default=20.0, help="duration of a soak (default: 20)")
    arguments = parser.parse_args()
    machine = Machine.emulated() if arguments.emulated else Machine.gpu()
    few, soak_seconds = arguments.emulated or arguments.few, arguments.soak_seconds
    run = Run(machine, Report(machine=_describe(machine)), arguments.report)
    for part in arguments.parts or (KERNELS, SESSION, ENGINE, *(() if few else (TIMINGS,)), ENGINE_TIMINGS):
        if part == KERNELS:
            run.checks("lora", lambda: lora_checks(machine, subset=few))
            run.checks("attention", lambda: attention_checks(machine, subset=few))
            run.checks("product", lambda: product_checks(machine, subset=few))
            run.checks("quantized product", lambda: quantized_product_checks(machine, subset=few))
            run.checks("experts", lambda: expert_checks(machine, subset=few))
            run.checks("sparse", lambda: sparse_checks(machine, subset=few))
            run.checks("rows", lambda: row_checks(machine, subset=few))
            run.checks("states", lambda: state_checks(machine, subset=few))
            run.checks("latent", lambda: latent_checks(machine, subset=few))
            run.checks("vocabulary", lambda: vocabulary_checks(machine, subset=few))
        elif part == SESSION:
            run.checks("session", lambda: _served("session_checks").session_checks(machine, subset=few))
        elif part == ENGINE:
            run.checks("engine", lambda: _served("engine_checks").engine_checks(machine, few, soak_seconds))
        elif part == SOAK:
            run.checks("engine", lambda: _served("engine_checks").soak_checks(machine, few, soak_seconds))
        elif part == LOST_DEVICE:
            run.checks("lost device", lambda: _served("session_checks").lost_device_checks(machine))
        elif part == LOST_ENGINE:
            run.checks("lost engine", lambda: _served("engine_checks").lost_engine_checks(machine))
        elif part == TIMINGS:
            run.measure_rates()
            run.timings(lambda: lora_timings(machine, run.report.rates))
            run.timings(lambda: attention_timings(machine, run.report.rates))
            run.timings(lambda: product_timings(machine, run.report.rates))
            run.timings(lambda: sparse_timings(machine))
        elif part == ENGINE_TIMINGS:
            run.measure_rates()
            run.engine_timings(arguments.rows)
    run.report.write(arguments.report)
    print(run.report.text())
    return 1 if run.report.failed else 0


class Run:
    """Collects results. Prints each as it comes, and writes the report often, so that a timeout loses nothing."""

    def __init__(self, machine: Machine, report: Report, path: Path) -> None:
        self.machine = machine
        self.report = report
        self._path = path

    def checks(self, what: str, make: Callable[[], Iterable[Check]]) -> None:
        """Adds checks. An error counts as a failed check and ends its group."""
        try:
            for check in make():
                self.report.checks.append(check)
                if not check.passed:
                    print(f"FAILED {check.name}: {check.detail}", flush=True)
                elif what == "engine":
                    print(f"passed {check.name}: {check.detail}", flush=True)
                    self.report.write(self._path)
        except Exception as error:
            self._failed(what, error)
        self.report.write(self._path)

    def measure_rates(self) -> None:
        """Measures the machine's limits once."""
        if not self.report.rates:
            self.report.rates = measure_rates(self.machine) if self.machine.is_gpu else dict(_EMULATED_RATES)

    def timings(self, make: Callable[[], Iterable[Timing]]) -> None:
        """Adds timings of kernels."""
        try:
            for timing in make():
                self.report.timings.append(timing)
        except Exception as error:
            self._failed("timings", error)
        self.report.write(self._path)

    def engine_timings(self, rows: list[str]) -> None:
        """Adds rows of the engine. An error in one of its parts does not keep the others from being measured."""
        try:
            timings = _served("engine_timings")
        except ImportError as error:
            self._failed("engine timings", error)
            return
        for name in rows or timings.PARTS:
            try:
                for found in timings.engine_timings(self.machine, self.report.rates, name):
                    if isinstance(found, Row):
                        self.report.rows.append(found)
                        print("  ".join(cell for cell in row_cells(found) if cell), flush=True)
                    else:
                        self.report.kernels.append(found)
                    self.report.write(self._path)
            except Exception as error:
                self._failed(f"engine timings of {name}", error)

    def _failed(self, what: str, error: Exception) -> None:
        traceback.print_exc()
        self.report.checks.append(Check(f"{what}: all ran", False, f"{type(error).__name__}: {error}"))
        print(f"FAILED {what}: {error}", flush=True)
        self.report.write(self._path)


def _served(module: str) -> Any:
    """Returns a module that needs more packages than the kernels' checks."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    return importlib.import_module(module)


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
