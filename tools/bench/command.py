"""The command line of `adaptrt bench`: makes the model once, measures, prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ... import __version__
from ..._core import ConfigError, MachineLimits, cpu_kernels, measure_machine_limits
from .model import BenchModel, write_model
from .scenarios import BATCH, RANK, Row, Scenarios

DEFAULT_DIRECTORY = Path("~/.cache/adaptrt/bench")
ENGINE_LIMITS = {"max_batch_size": BATCH, "max_input_len": 1024, "max_seq_len": 2048, "max_num_tokens": 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--work_dir",
        type=Path,
        default=DEFAULT_DIRECTORY,
        help=f"where the model and its engine are made and kept, about 3 GB (default: {DEFAULT_DIRECTORY})",
    )
    parser.add_argument("--repeats", type=int, default=5, help="samples of each row (default: 5)")
    parser.add_argument("--num_threads", type=int, default=None, help="threads of the engine (default: all cores)")
    parser.add_argument("--output", type=Path, default=None, help="write the figures to this file as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}; accepted: 1 and more")
    if args.num_threads is not None and args.num_threads < 1:
        raise ConfigError(f"--num_threads is {args.num_threads}; accepted: 1 and more")
    console = Console()
    model = BenchModel()
    engine = prepare_engine(model, args.work_dir.expanduser(), console)
    threads = args.num_threads or len(os.sched_getaffinity(0))
    console.print("measuring the machine's limits")
    limits = measure_machine_limits(threads)
    scenarios = Scenarios(model, engine, limits, args.repeats, threads)
    rows = scenarios.run(lambda group: console.print(f"measuring {group}"))
    console.print(table_of(rows, limits, threads))
    if args.output is not None:
        args.output.write_text(json.dumps(report_of(rows, limits, threads), indent=2) + "\n")
    return 0


def prepare_engine(model: BenchModel, directory: Path, console: Console) -> Path:
    """The engine of `model` with LoRA of up to rank 64 on all modules; made when it is not there."""
    from ...builder.cli import main as command_line

    engine = directory / f"engine-{__version__}"
    if (engine / "config.json").exists():
        return engine
    if not (directory / "model" / "config.json").exists():
        console.print(f"making a random model in {directory}")
        write_model(model, directory / "model")
    checkpoint = directory / "checkpoint"
    if not (checkpoint / "config.json").exists():
        _succeed(command_line(["convert-checkpoint", "--model_dir", str(directory / "model"),
                               "--output_dir", str(checkpoint), "--dtype", "bfloat16"]))  # fmt: skip
    limits = [text for name, value in ENGINE_LIMITS.items() for text in (f"--{name}", str(value))]
    _succeed(command_line(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine),
                           "--lora_plugin", "auto", "--dora_plugin", "enable", "--max_lora_rank", "64",
                           *limits]))  # fmt: skip
    return engine


def _succeed(status: int) -> None:
    if status != 0:
        raise ConfigError(f"the benchmark's engine could not be built (exit status {status})")


def table_of(rows: list[Row], limits: MachineLimits, threads: int) -> Table:
    """What a person reads."""
    table = Table(
        title=f"0.5B Llama shape, bfloat16, {threads} threads, {cpu_kernels()[0]} kernels",
        caption=f"machine: reads {limits.read_bandwidth / 1e9:.1f} GB/s, "
        f"bf16 {limits.bfloat16_flops / 1e9:.0f} GFLOP/s; "
        f"adapters of rank {RANK} on all modules",
    )
    table.add_column("row")
    for heading in ("median", "min", "max"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    table.add_column("share")
    for row in rows:
        share = "" if row.share is None else f"{100 * row.share:.0f}% of {row.of}"
        table.add_row(row.name, *(f"{value:.1f}" for value in (row.median, row.low, row.high)), row.unit, share)
    return table


def report_of(rows: list[Row], limits: MachineLimits, threads: int) -> dict[str, Any]:
    """What a program reads."""
    return {
        "version": __version__,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": threads,
            "kernels": cpu_kernels()[0],
            "read_bandwidth_bytes_per_second": limits.read_bandwidth,
            "bfloat16_flops_per_second": limits.bfloat16_flops,
        },
        "rows": [row.as_json() for row in rows],
    }
