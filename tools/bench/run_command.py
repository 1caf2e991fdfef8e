"""Shared code of commands that run a bench: flags, the final report, and profiles."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from ..._core import ConfigError, ExecutorConfig
from ...common.number_flags import MAX_INT32, integer
from ...common.usable_cpus import num_usable_cpus
from ...runtime.compiled_engine import CompiledEngine
from .display import profile_table, tables_of
from .executors import AdapterLibrary, BenchExecutor, CpuUse, key_of, problems_of
from .limits import TRIES, machine_limits, peak_of
from .plots import require_matplotlib, write_plots
from .profile import chrome_trace, step_seconds, summarise, write_chrome_trace
from .report import Report
from .runner import profiled_steps
from .scenario_types import Decode, Prefill, RunSettings, Scenario

FILE_WIDTH: Final = 120
"""Width of tables that are not written to a terminal."""


def add_run_arguments(parser: argparse.ArgumentParser, *, repeats: str) -> None:
    """Declares the flags of a run. `repeats` describes the default of --repeats."""
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="scenarios to run; those that they are compared with also run",
    )
    parser.add_argument("--repeats", type=integer(1, MAX_INT32), metavar="N", help=f"rounds (default: {repeats})")
    parser.add_argument(
        "--num_threads",
        type=integer(1, MAX_INT32),
        metavar="N",
        help="threads of the engine, per rank (default: all cores)",
    )
    parser.add_argument(
        "--kernels", metavar="NAME", default="", help="kernels of the engine (default: chosen for this CPU)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw plots of the report; needs adaptrt[bench]")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR",
        help="instead of measuring, profile every op of the prefill and decode scenarios: print tables, and write "
        "Chrome traces to this directory",
    )  # fmt: skip


def check_run_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for invalid flags before anything is measured."""
    for name in ("repeats", "num_threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; accepted: 1 and more")
    for problem in ExecutorConfig(kernels=args.kernels).validate():
        raise ConfigError(f"--{problem}")
    if args.profile is not None and (args.output is not None or args.plots is not None):
        raise ConfigError("--profile writes no report; leave out --output and --plots")
    if args.plots is not None:
        require_matplotlib()


def settings_of(args: argparse.Namespace, settings: RunSettings) -> RunSettings:
    """The settings with the number of rounds from the flags."""
    return settings if args.repeats is None else replace(settings, repeats=args.repeats)


def cpu_of(args: argparse.Namespace, ranks_here: int = 1) -> CpuUse:
    """CPU resources of an engine from the flags, if `ranks_here` of its ranks run on this machine."""
    return CpuUse(args.num_threads or max(1, num_usable_cpus() // ranks_here), args.kernels)


def make_console() -> Console:
    """The console for tables."""
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def selected(names: Sequence[str], scenarios: Sequence[Scenario], subject: Path) -> list[str]:
    """Scenario names that `names` select; the name of a sweep selects all of it. Raises ConfigError for unknown
    names."""
    by_name = {scenario.name for scenario in scenarios}
    sweeps: dict[str, list[str]] = {}
    for scenario in scenarios:
        sweeps.setdefault(getattr(scenario, "sweep", None) or scenario.name, []).append(scenario.name)
    unknown = [name for name in names if name not in by_name and name not in sweeps]
    if unknown:
        raise ConfigError(f"--only: no scenario {', '.join(unknown)}; {subject} has: {', '.join(sweeps)}")
    return [found for name in names for found in sweeps.get(name, [name])]


def measure(run: Callable[[], Report], args: argparse.Namespace, console: Console) -> None:
    """Runs the bench, and prints and writes the report. First raises ConfigError for paths that cannot be written."""
    output, plots = args.output, args.plots
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--output {output}: cannot be written; expected a file in a directory that is there")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    report = run()
    for table in tables_of(report):
        console.print(table)
    if output is not None:
        report.save(output)
    if plots is not None:
        for path in write_plots(report, plots):
            console.print(f"wrote {path}")


def profile(
    subject: Path,
    scenarios: Sequence[Scenario],
    engines: Mapping[str, CompiledEngine],
    library: Callable[[CompiledEngine], AdapterLibrary],
    cpu: CpuUse,
    directory: Path,
    console: Console,
) -> None:
    """Profiles the prefill and decode scenarios. Adapters come from `library` of each engine.

    Raises ConfigError if there are no such scenarios.
    """
    profiled = [scenario for scenario in scenarios if isinstance(scenario, (Prefill, Decode))]
    if not profiled:
        raise ConfigError(f"{subject}: has no prefill or decode scenario to profile")
    directory.mkdir(parents=True, exist_ok=True)
    for scenario in profiled:
        engine = engines[scenario.engine]
        if problems := problems_of(scenario, engine):
            raise ConfigError(f"{subject}: scenario '{scenario.name}' " + "; ".join(problems))
        bench = BenchExecutor(engine, key_of(scenario), [scenario], cpu, profiled=True, library=library(engine))
        try:
            steps = profiled_steps(bench, scenario, warm_up=True)
        finally:
            bench.close()
        limits = machine_limits(cpu.num_threads, TRIES)
        program = engine.storage.program
        trace = directory / f"{scenario.name}.json"
        write_chrome_trace(trace, chrome_trace(steps, program, scenario.title))
        flops = limits[peak_of(program, limits)]
        mean = sum(step.end - step.begin for step in steps) / len(steps)
        title = f"{scenario.title}: mean of {len(steps)} steps, median {1e3 * step_seconds(steps):.2f} ms; {trace}"
        console.print(profile_table(title, summarise(steps, program), mean, limits["read_bandwidth"], flops))
