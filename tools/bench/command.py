"""The command line of `adaptrt bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from ..._core import ConfigError
from ...builder.commands import engine_flags
from ...formats.engine.build_config import CUDA
from ...runtime.compiled_engine import CompiledEngine
from ...runtime.native_engine import NativeEngine
from . import engine_rows
from .executors import AdapterLibrary, load_measured_engine
from .on_ranks import follow, is_run_by_workers, leading
from .run_command import (
    add_run_arguments,
    check_run_arguments,
    cpu_of,
    make_console,
    measure,
    profile,
    selected,
    settings_of,
)
from .runner import Bench
from .scenario_types import RunSettings

SETTINGS: Final = RunSettings(repeats=3, quiet_share=0.06, extra_samples=0, quiet_wait=0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "engine", type=Path, metavar="ENGINE", help="directory of the engine to measure under the load below"
    )
    engine_flags.add_weight_memory(parser)
    add_run_arguments(parser, repeats=str(SETTINGS.repeats))
    engine_rows.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, or profile, and report.

    Under MPI only rank 0 does this; the other ranks return when it ends. Without MPI, workers run the ranks.
    """
    check_run_arguments(args)
    if not args.engine.is_dir():
        raise ConfigError(
            f"{args.engine}: is not a directory; expected an engine. To run AdaptRT's own scenarios, use "
            "bench/run.py in its repository"
        )
    engine = load_measured_engine(args.engine, args.weight_memory)
    if not isinstance(engine, NativeEngine):
        if args.profile is not None:
            raise ConfigError(f"--profile {args.profile}: the steps of an engine of backend {CUDA} are not recorded")
        _measure_or_profile(args, engine, 1)
        return 0
    if is_run_by_workers(engine):
        if args.profile is not None:
            raise ConfigError(
                f"--profile {args.profile}: steps of worker processes are not recorded; to record rank 0's steps, run "
                f"mpirun -n {engine.num_ranks} adaptrt bench {args.engine} --profile {args.profile}"
            )
        ranks_here = engine.num_ranks
    else:
        ranks_here = 1 if engine.num_ranks == 1 else engine.ranks.on_this_host  # All ranks compute this together.
    if engine.rank > 0:
        follow(engine)
        return 0
    with leading(engine):
        _measure_or_profile(args, engine, ranks_here)
    return 0


def _measure_or_profile(args: argparse.Namespace, engine: CompiledEngine, ranks_here: int) -> None:
    rows = engine_rows.engine_rows(args, engine)
    if args.only:
        wanted = selected(args.only, rows, args.engine)
        rows = tuple(row for row in rows if row.name in wanted)
    engines, cpu, console = {engine_rows.NAME: engine}, cpu_of(args, ranks_here), make_console()
    if args.profile is not None:
        profile(args.engine, rows, engines, AdapterLibrary, cpu, args.profile, console)
    else:
        settings = settings_of(args, SETTINGS)
        measure(Bench(args.engine, rows, settings, engines, cpu, console.print).run, args, console)
