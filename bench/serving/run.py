"""Measures a server's overhead: tokens per second and time to first token over HTTP, compared with the executor.

    python bench/serving/run.py --home DIR [--servers adaptrt vllm llama_cpp] [--repeats 5] [--output report.json]

HOME is the directory given to bench/peers/run.py: it has the model, its adapters, AdaptRT's engine and the peers'
environments. Servers and the executor are measured in turn; the others are stopped meanwhile. With --engine and
--adapters of another model, HOME may be any directory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from client import Crowd, Stream, ask_server, tokens_per_second
from rich.console import Console
from rich.table import Table
from servers import BASE, Server, start_adaptrt, start_llama_cpp, start_vllm

import adaptrt
from adaptrt import __version__
from adaptrt.tools.bench.noise import NoiseMeter, wait_until_quiet
from adaptrt.tools.bench.report import ComparisonResult, Figure, NotRun, Report, Row, Sample, paired_ratio
from adaptrt.tools.bench.system import describe_machine, utc_now
from adaptrt.tools.bench.workload import random_prompt

EXECUTOR, OURS = "executor", "adaptrt"
SERVERS = (OURS, "vllm", "llama_cpp")
ADAPTERS, PROMPT_TOKENS, WARM_UP_TOKENS = 16, 64, 4
IDLE_SECONDS = 5.0
ALONE = "alone"
RATE, FIRST, IDLE = "tokens", "first", "idle"
LEAST_SHARE, MOST_DELAY = 0.97, 0.003
"""Targets for the server: minimum share of the executor's tokens per second, and maximum seconds that it may add to the
time to first token."""


class OwnExecutor:
    """The executor in this process, used in the same way as by the server."""

    def __init__(self, engine: Path, adapters: dict[str, Path], threads: int) -> None:
        self._executor = adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=threads))
        self.vocabulary = self._executor.engine_info.vocab_size
        for name, path in adapters.items():
            self._executor.add_adapter(name, path)

    def ask(self, crowd: Crowd) -> list[Stream]:
        """Sends all requests of a crowd at once."""
        asked: dict[int, float] = {}
        arrivals: dict[int, list[float]] = defaultdict(list)
        tokens: dict[int, int] = defaultdict(int)
        for model, prompt in zip(crowd.models, crowd.prompts, strict=True):
            request = adaptrt.Request(list(prompt), crowd.max_tokens, streaming=True)
            began = time.perf_counter()
            asked[self._executor.enqueue_request(request, adapter=None if model == BASE else model)] = began
        running = set(asked)
        while running:
            for response in self._executor.await_responses():
                if response.has_error():
                    raise RuntimeError(response.error_msg)
                arrivals[response.request_id].append(time.perf_counter())
                tokens[response.request_id] += len(response.result.output_token_ids[0])
                if response.result.is_final:
                    running.discard(response.request_id)
        return [Stream(began, tuple(arrivals[id]), tokens[id]) for id, began in asked.items()]

    def close(self) -> None:
        """Shuts down the executor."""
        self._executor.shutdown()


def first_token_seconds(streams: Sequence[Stream]) -> float:
    """Median over a crowd."""
    return statistics.median(stream.first for stream in streams)


class Measurement:
    """Samples by row and engine."""

    def __init__(self, quiet_share: float, quiet_wait: float) -> None:
        self._quiet_share, self._quiet_wait = quiet_share, quiet_wait
        self.samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)

    def take(self, row: str, engine: str, number: int, ask: Callable[[], list[Stream]], server: Server | None) -> None:
        """Asks once, and takes a sample of two rows."""
        wait_until_quiet(self._quiet_share, self._quiet_wait)
        before = server.cpu_seconds() if server else {}
        with NoiseMeter([server.process.pid] if server else []) as meter:
            streams = ask()
        after = server.cpu_seconds() if server else {}
        spent = {f"cpu_{name}": after[name] - before.get(name, 0.0) for name in after}
        self._add(f"{row}-{RATE}", engine, number, {"value": tokens_per_second(streams), **spent}, meter)
        self._add(f"{row}-{FIRST}", engine, number, {"value": first_token_seconds(streams)}, meter)

    def take_idle(self, row: str, server: Server, number: int) -> None:
        """CPU time of an idle server."""
        before = sum(server.cpu_seconds().values())
        with NoiseMeter([server.process.pid]) as meter:
            time.sleep(IDLE_SECONDS)
        spent = sum(server.cpu_seconds().values()) - before
        self._add(f"{row}-{IDLE}", OURS, number, {"value": spent / IDLE_SECONDS}, meter)

    def _add(self, row: str, engine: str, number: int, metrics: dict[str, float], meter: NoiseMeter) -> None:
        foreign, stolen = meter.noise.foreign, meter.noise.stolen
        disturbed = foreign > self._quiet_share
        self.samples[row, engine].append(Sample(number, metrics, round(foreign, 4), round(stolen, 4), disturbed))


class Contest:
    """The servers and the executor with one set of adapters, asked in turn."""

    def __init__(
        self, row: str, adapters: dict[str, Path], streams: int, args: argparse.Namespace, console: Console
    ) -> None:
        """Starts them. Servers that fail to start are in `not_run`."""
        root = args.home / "models" / args.model
        engine = args.engine or root / "adaptrt-bf16"
        self._row, self._args, self._console = row, args, console
        self._models = list(itertools.islice(itertools.cycle(list(adapters) or [BASE]), streams))
        self._own = OwnExecutor(engine, adapters, args.threads)
        self._running: dict[str, Server] = {}
        self.not_run: list[NotRun] = []
        starts: dict[str, Callable[[Path], Server]] = {
            OURS: lambda log: start_adaptrt(engine, adapters, args.threads, log),
            "vllm": lambda log: start_vllm(args.home, root / "base", adapters, args.threads, log),
            "llama_cpp": lambda log: start_llama_cpp(args.home, root / "gguf" / "base.gguf", args.threads, log),
        }
        for name in args.servers:
            console.print(f"{row}: starting {name}")
            try:
                if name == "llama_cpp" and adapters:
                    raise RuntimeError("it does not batch requests with different adapters")
                self._running[name] = starts[name](args.home / f"serving-{name}.log")
                self._running[name].pause()
            except (RuntimeError, OSError) as error:
                self.not_run.append(NotRun(f"{row}/{name}", row, str(error)))

    def run(self, measurement: Measurement, generator: np.random.Generator) -> None:
        """Runs all rounds; the round before the first is the warm-up."""
        for number in range(-1, self._args.repeats):
            began = time.monotonic()
            asked = [EXECUTOR, *self._running]
            for name in asked if number % 2 == 0 else asked[::-1]:
                self._ask(name, generator, number, measurement)
            self._console.print(f"{self._row}: round {number + 1}: {time.monotonic() - began:.0f} s")

    def close(self) -> None:
        """Ends all servers and the executor."""
        for server in self._running.values():
            server.close()
        self._own.close()

    def _crowd(self, new_tokens: int, generator: np.random.Generator) -> Crowd:
        """A crowd with new prompts, because the prefixes of old ones may be reused."""
        vocabulary = self._own.vocabulary
        prompts = [random_prompt(PROMPT_TOKENS, vocabulary, generator) for _ in self._models]
        return Crowd(self._models, prompts, new_tokens)

    def _ask(self, name: str, generator: np.random.Generator, number: int, measurement: Measurement) -> None:
        server = self._running.get(name)
        ask = self._own.ask if server is None else partial(ask_server, server.address)
        if server is not None:
            server.go_on()
        # Another warm-up, because others used the CPU's caches while the server was stopped, and Linux may have evicted
        # its pages.
        ask(self._crowd(WARM_UP_TOKENS, generator))
        if number >= 0:
            crowd = self._crowd(self._args.new_tokens, generator)
            measurement.take(self._row, name, number, partial(ask, crowd), server)
        if server is not None:
            if name == OURS and number >= 0:
                measurement.take_idle(self._row, server, number)
            server.pause()


def measure(args: argparse.Namespace, console: Console) -> tuple[Measurement, list[NotRun]]:
    """Measures crowds with the base model and with adapters, then single requests."""
    if args.adapters is None:
        folder = args.home / "models" / args.model / "adapters"
        paths = [folder / f"lora{number:02d}" for number in range(ADAPTERS)]
    else:
        paths = sorted(args.adapters.iterdir())
    adapters = {path.name: path for path in paths}
    generator = np.random.default_rng(0)
    measurement, not_run = Measurement(args.quiet_share, args.quiet_wait), []
    for row, served, streams in ((BASE, {}, args.streams), ("adapters", adapters, args.streams), (ALONE, adapters, 1)):
        contest = Contest(row, served, streams, args, console)
        try:
            contest.run(measurement, generator)
        finally:
            contest.close()
        not_run += contest.not_run
    return measurement, not_run


def compared(row: str, figures: dict[tuple[str, str], Figure]) -> list[ComparisonResult]:
    """Compares AdaptRT's server with the executor and a target, and with the other servers."""
    ours, results = figures[row, OURS], []
    for (other_row, other), theirs in figures.items():
        if other_row != row or other == OURS:
            continue
        base, ratio = f"{row}/{other}", paired_ratio(ours, theirs)
        is_own = other == EXECUTOR
        if row.endswith(FIRST) and is_own:
            delay = paired_difference(ours, theirs)
            # A crowd has no target: its time to first token depends on which requests share a step.
            most = MOST_DELAY if row.startswith(ALONE) else None
            results.append(
                ComparisonResult(base, "difference", delay, None, most, None if most is None else delay <= most)
            )
        else:
            least = LEAST_SHARE if is_own and not row.startswith(ALONE) else None
            results.append(
                ComparisonResult(base, "ratio", ratio, least, None, None if least is None else ratio >= least)
            )
    return results


def paired_difference(ours: Figure, theirs: Figure) -> float:
    """Median difference over their common rounds."""
    mine, others = ours.by_round(), theirs.by_round()
    return statistics.median(mine[number] - others[number] for number in mine if number in others)


def report_of(args: argparse.Namespace, measurement: Measurement, not_run: list[NotRun]) -> Report:
    """Report with AdaptRT's server compared with the executor and the other servers."""
    figures = {
        key: Figure("CPUs" if key[0].endswith(IDLE) else "s" if key[0].endswith(FIRST) else "tok/s", samples)
        for key, samples in measurement.samples.items()
    }
    rows = [
        Row(
            f"{row}/{engine}",
            row,
            row,
            engine,
            {},
            figure,
            comparisons=compared(row, figures) if engine == OURS else [],
        )
        for (row, engine), figure in figures.items()
    ]
    return Report(
        version=__version__,
        created=utc_now(),
        machine=describe_machine(args.threads),
        run={"model": args.model, "repeats": args.repeats, "new_tokens": args.new_tokens, "streams": args.streams,
             "scenarios": "bench/serving"},
        scenario_file="",
        limits={},
        rows=rows,
        not_run=not_run,
    )  # fmt: skip


def table_of(report: Report) -> Table:
    """Table of rows by engines."""
    table = Table("row", "engine", "median", "spread", "against")
    for row in report.rows:
        figure = row.figure
        against = [f"{result.measure} to {result.base}: {result.ratio:.4g}{said(result)}" for result in row.comparisons]
        spread = f"{figure.low:.4g} to {figure.high:.4g}"
        table.add_row(row.kind, row.engine, f"{figure.median:.4g} {figure.unit}", spread, "\n".join(against))
    return table


def said(result: ComparisonResult) -> str:
    """Text that says if a target was met."""
    return "" if result.holds is None else ", met" if result.holds else ", missed"


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="directory given to bench/peers/run.py")
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--engine", type=Path, help="engine of the model (default: the one in HOME)")
    parser.add_argument(
        "--adapters", type=Path, metavar="DIR", help="directory of PEFT directories (default: those in HOME)"
    )
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests, each with the next adapter")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[OURS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet_share", type=float, default=0.06)
    parser.add_argument("--quiet_wait", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.home = args.home.resolve()
    args.home.mkdir(parents=True, exist_ok=True)
    console = Console()
    report = report_of(args, *measure(args, console))
    console.print(table_of(report))
    for entry in report.not_run:
        console.print(f"not run: {entry.name}: {entry.reason}", markup=False)
    if args.output:
        report.save(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
