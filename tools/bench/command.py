"""The command line of `adaptrt bench`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from ..._core import ConfigError, ExecutorConfig
from . import engine_rows
from .display import profile_table, tables_of
from .engines import EngineShelf
from .executors import BenchExecutor, CpuUse, key_of, load_native_engine, problems_of
from .limits import TRIES, machine_limits, peak_of
from .plots import require_matplotlib, write_plots
from .profile import chrome_trace, step_seconds, summarise, write_chrome_trace
from .runner import Bench, profiled_steps
from .scenario_types import Decode, Prefill, ScenarioFile

SHIPPED: Final = Path(__file__).parent / "scenarios"
DEFAULT_WORK_DIR: Final = Path("~/.cache/adaptrt/bench")
DEFAULT_SCENARIOS: Final = "default"
FILE_WIDTH: Final = 120
"""Columns of tables that go to no terminal."""


def shipped_files() -> dict[str, Path]:
    """Scenario files that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    names = ", ".join(shipped_files())
    parser.add_argument(
        "scenarios", nargs="?", default=DEFAULT_SCENARIOS, metavar="ENGINE|SCENARIOS",
        help="an engine's directory, which is measured with the load that flags describe; or scenarios that AdaptRT is "
        f"measured by: a TOML file, or a shipped one: {names} (default: {DEFAULT_SCENARIOS})",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="scenarios to run, and those that they are compared with"
    )
    parser.add_argument(
        "--work_dir", type=Path, default=DEFAULT_WORK_DIR, metavar="DIR",
        help=f"where models and engines are made and kept (default: {DEFAULT_WORK_DIR})",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds, instead of the file's")
    parser.add_argument("--num_threads", type=int, metavar="N", help="threads of the engine (default: all cores)")
    parser.add_argument(
        "--kernels", metavar="NAME", default="", help="kernels of the engine (default: those chosen for this CPU)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the report; needs adaptrt[bench]")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR",
        help="instead of measuring, time every op of the prefill and decode scenarios: a table of each, and a Chrome "
        "trace in this directory",
    )  # fmt: skip
    engine_rows.add_arguments(parser)


def _file_for(args: argparse.Namespace) -> ScenarioFile:
    """What is measured: rows of an engine, or those of a scenario file."""
    if args.scenarios not in shipped_files() and Path(args.scenarios).is_dir():
        return engine_rows.engine_rows(args, Path(args.scenarios))
    engine_rows.refuse_beside_file(args)
    try:
        from .scenario_file import load_scenarios
    except ModuleNotFoundError as error:
        raise ConfigError(f"adaptrt bench SCENARIOS needs {error.name}: pip install 'adaptrt[bench]'") from error
    return load_scenarios(_path_of(args.scenarios))


def run(args: argparse.Namespace) -> int:
    """Measure, or profile, and report."""
    for name in ("repeats", "num_threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; accepted: 1 and more")
    for problem in ExecutorConfig(kernels=args.kernels).validate():
        raise ConfigError(f"--{problem}")
    if args.profile is not None and (args.output is not None or args.plots is not None):
        raise ConfigError("--profile makes no report, so --output and --plots have no effect beside it")
    if args.plots is not None:
        require_matplotlib()
    file = select(_file_for(args), args.only)
    if args.repeats is not None:
        file = replace(file, run=replace(file.run, repeats=args.repeats))
    cpu = CpuUse(args.num_threads or len(os.sched_getaffinity(0)), args.kernels)
    console, work_dir = Console(width=None if sys.stdout.isatty() else FILE_WIDTH), args.work_dir.expanduser()
    if args.profile is not None:
        profile(file, work_dir, cpu, args.profile, console)
        return 0
    _make_room(args.output, args.plots)
    report = Bench(file, work_dir, cpu, console.print).run()
    for table in tables_of(report):
        console.print(table)
    if args.output is not None:
        report.save(args.output)
    if args.plots is not None:
        for path in write_plots(report, args.plots):
            console.print(f"wrote {path}")
    return 0


def _make_room(output: Path | None, plots: Path | None) -> None:
    """Refuses places that a report cannot be written to, before anything is measured."""
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--output {output}: cannot be written; expected a file in a directory that is there")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)


def _path_of(name: str) -> Path:
    shipped = shipped_files()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"{name}: is not a file, and none of the scenario files that are shipped: {', '.join(shipped)}"
        )
    return path


def select(file: ScenarioFile, names: list[str]) -> ScenarioFile:
    """The scenarios of these names (a sweep's for all of it) and what they are compared with; all without names.

    Raises ConfigError for a name that is not there.
    """
    if not names:
        return file
    by_name = {scenario.name: scenario for scenario in file.scenarios}
    sweeps: dict[str, list[str]] = {}
    for scenario in file.scenarios:
        sweeps.setdefault(getattr(scenario, "sweep", None) or scenario.name, []).append(scenario.name)
    unknown = [name for name in names if name not in by_name and name not in sweeps]
    if unknown:
        raise ConfigError(f"--only: no scenario {', '.join(unknown)}; {file.path} has: {', '.join(sweeps)}")
    wanted = {found for name in names for found in sweeps.get(name, [name])}
    wanted |= {c.base for name in wanted for c in by_name[name].comparisons if c.base is not None}
    return replace(file, scenarios=tuple(scenario for scenario in file.scenarios if scenario.name in wanted))


def profile(file: ScenarioFile, work_dir: Path, cpu: CpuUse, directory: Path, console: Console) -> None:
    """Profile the prefill and decode scenarios of a file. Raises ConfigError when it has none."""
    scenarios = [scenario for scenario in file.scenarios if isinstance(scenario, (Prefill, Decode))]
    if not scenarios:
        raise ConfigError(f"{file.path}: has no prefill or decode scenario to profile")
    directory.mkdir(parents=True, exist_ok=True)
    directories, reasons = EngineShelf(work_dir, console.print).prepare(file)
    for scenario in scenarios:
        if scenario.engine in reasons:
            console.print(f"{scenario.title}: not run: engine '{scenario.engine}': {reasons[scenario.engine]}")
            continue
        engine = load_native_engine(directories[scenario.engine])
        if problems := problems_of(scenario, engine):
            raise ConfigError(f"{file.path}: scenario '{scenario.name}' " + "; ".join(problems))
        bench = BenchExecutor(engine, key_of(scenario), [scenario], cpu, profiled=True)
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
