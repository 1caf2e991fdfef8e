"""The command line of bench/run.py."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Final

from adaptrt import ConfigError
from adaptrt.tools.bench.run_command import (
    add_run_arguments,
    check_run_arguments,
    cpu_of,
    make_console,
    measure,
    profile,
    selected,
    settings_of,
)

from .bench import ScenarioBench
from .engines import EngineShelf
from .kinds import ScenarioFile
from .random_adapters import RandomAdapters
from .scenario_file import load_scenarios

SCENARIOS: Final = Path(__file__).parent
DEFAULT_WORK_DIR: Final = Path("~/.cache/adaptrt/bench")
DEFAULT_SCENARIOS: Final = "default"


def known_files() -> dict[str, Path]:
    """Scenario files in the repository, by name."""
    return {path.stem: path for path in sorted(SCENARIOS.glob("*.toml"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    names = ", ".join(known_files())
    parser.add_argument(
        "scenarios", nargs="?", default=DEFAULT_SCENARIOS, metavar="SCENARIOS",
        help=f"a TOML file, or one of the repository's files: {names} (default: {DEFAULT_SCENARIOS})",
    )  # fmt: skip
    parser.add_argument(
        "--work_dir", type=Path, default=DEFAULT_WORK_DIR, metavar="DIR",
        help=f"directory of models and engines, which are built once (default: {DEFAULT_WORK_DIR})",
    )  # fmt: skip
    add_run_arguments(parser, repeats="the file's")


def run(args: argparse.Namespace) -> int:
    """Measures, or profiles, and reports."""
    check_run_arguments(args)
    file = select(load_scenarios(_path_of(args.scenarios)), args.only)
    file = replace(file, run=settings_of(args, file.run))
    work_dir, cpu, console = args.work_dir.expanduser(), cpu_of(args), make_console()
    if args.profile is None:
        measure(lambda: ScenarioBench(file, work_dir, cpu, console.print).run(), args, console)
        return 0
    shelf = EngineShelf(work_dir, console.print)
    directories, reasons = shelf.prepare(file)
    engines = shelf.load(file, directories)
    for scenario in file.scenarios:
        if scenario.engine in reasons:
            console.print(f"{scenario.title}: not run: engine '{scenario.engine}': {reasons[scenario.engine]}")
    runnable = [scenario for scenario in file.scenarios if scenario.engine in engines]
    profile(file.path, runnable, engines, RandomAdapters, cpu, args.profile, console)
    return 0


def select(file: ScenarioFile, names: list[str]) -> ScenarioFile:
    """The file with only the named scenarios and their bases; no names: all.

    The name of a sweep, or of a table with several engines, selects all of it.

    Raises ConfigError for an unknown name.
    """
    if not names:
        return file
    tables = {name: found for name, found in file.groups.items() if len(found) > 1}
    names = [found for name in names for found in tables.get(name, (name,))]
    wanted: set[str] = set()
    found = set(selected(names, file.scenarios, file.path))
    while found:  # a base may have a base of its own
        wanted |= found
        found = {one.base for name in found for one in file.comparisons[name] if one.base is not None} - wanted
    return replace(file, scenarios=tuple(scenario for scenario in file.scenarios if scenario.name in wanted))


def _path_of(name: str) -> Path:
    known = known_files()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: is not a file, and none of the repository's scenario files: {', '.join(known)}")
    return path
