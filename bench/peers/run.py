"""Runs AdaptRT and its peers on one model, interleaved, and writes one report, one table and one plot.

    python bench/peers/run.py --home DIR [--model 0.5b] [--peers ...] [--rows ...] [--output report.json] [--plot p.png]

HOME has the virtual environments that install.sh made, and the models.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from models import MODELS, export_for, make_model
from own import BenchModel, FamilyModel
from pictures import PEERS, draw, table_of
from process import OURS, PeerError, PeerProcess
from rich.console import Console
from rows import ROWS, Target, groups, peak_of_row, rows_of, source_of_peers, target_of_row, work_of_row

from adaptrt import __version__
from adaptrt.tools.bench.display import reasons_not_run
from adaptrt.tools.bench.limits import CpuLimits, LimitMeter, beside, rates_at_limit, roofline_shares
from adaptrt.tools.bench.noise import wait_until_quiet
from adaptrt.tools.bench.profile import Work
from adaptrt.tools.bench.report import ComparisonResult, Figure, NotRun, Report, Row, Sample, paired_ratio
from adaptrt.tools.bench.system import describe_machine, utc_now

SETTINGS = (
    "model", "repeats", "new_tokens", "threads", "quiet_share", "quiet_wait", "extra_samples", "slow_sample",
)  # fmt: skip

Peer = TypeVar("Peer")
TABLE_WIDTH = 120
FAILURES = 3
"""Number of failed samples of a row after which a peer is not asked for it again."""


@dataclass
class Run:
    """All measurements, by row and peer."""

    args: argparse.Namespace
    model: BenchModel | FamilyModel
    console: Console
    limits: LimitMeter
    workers: dict[str, PeerProcess] = field(default_factory=dict)
    """Processes of the current group."""
    about: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    not_run: dict[tuple[str, str], str] = field(default_factory=dict)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    slow: set[tuple[str, str]] = field(default_factory=set)
    """Rows and peers whose first sample took long. They are measured only in every second round."""

    def measure(self, root: Path) -> None:
        """Measures all groups, one after another."""
        for index, group in enumerate(groups()):
            rows = [row for row in group if row in self.args.rows]
            if not rows:
                continue
            try:
                self._start(root, rows)
                self._warm_up(rows)
                for number in range(self.args.repeats):
                    self._measure_round(rows, index * self.args.repeats + number)
            finally:
                for worker in self.workers.values():
                    worker.close()
                self.workers.clear()

    def _start(self, root: Path, rows: list[str]) -> None:
        """Starts the peers one after another; each is stopped when it is ready."""
        for name in self.args.peers:
            asked = [row for row in rows if is_asked(row, name)]
            if not asked:
                continue
            self.console.print(f"starting {name}")
            try:
                export_for(name, root, self.args.home, {ROWS[row].weights for row in asked})
                worker = PeerProcess(
                    name, root, self.args.home, self.args.threads, self.args.new_tokens, self.args.patience
                )
            except (PeerError, subprocess.CalledProcessError, OSError, StopIteration) as error:
                reason = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
                self.not_run.update({(row, name): reason for row in asked})
                continue
            worker.pause()
            self.workers[name] = worker
            self.about[name] = worker.about
            for row in asked:
                if row in worker.about["refused"]:
                    self.not_run[row, name] = worker.about["refused"][row]
                elif row not in worker.about["rows"]:
                    self.not_run[row, name] = ROWS[row].why_not

    def _warm_up(self, rows: list[str]) -> None:
        self.console.print("warming up")
        for row in rows:
            for name, worker in self.workers.items():
                if is_asked(row, name) and (row, name) not in self.not_run:
                    try:
                        worker.warm_up(row)
                    except PeerError as error:
                        self._give_up(row, name, error)

    def _measure_round(self, rows: list[str], number: int) -> None:
        start = time.monotonic()
        for row in rows:
            self.limits.measure(number)
            for name, worker in in_order(list(self.workers.items()), number):
                skipped = (row, name) in self.not_run or (number % 2 == 1 and (row, name) in self.slow)
                if is_asked(row, name) and not skipped:
                    self._measure_one(row, name, worker, number)
        self.limits.measure(number)
        self.console.print(f"round {number + 1}: {time.monotonic() - start:.0f} s")

    def _measure_one(self, row: str, name: str, worker: PeerProcess, number: int) -> None:
        held_against_limits = name == OURS and work_of_row(row, self.model) is not None
        for _ in range(1 + self.args.extra_samples):
            wait_until_quiet(self.args.quiet_share, self.args.quiet_wait)
            before = self.limits.measure(number) if held_against_limits else {}
            start = time.monotonic()
            try:
                metrics, meter = worker.measure(row)
            except PeerError as error:
                self.failures[row, name] += 1
                if not worker.is_alive or self.failures[row, name] == FAILURES:
                    self._give_up(row, name, error)
                return
            seconds = time.monotonic() - start
            if held_against_limits:
                metrics |= beside(before, self.limits.measure(number))
            noise = meter.noise
            disturbed = noise.foreign > self.args.quiet_share
            self.samples.setdefault((row, name), []).append(
                Sample(number, metrics, round(noise.foreign, 4), round(noise.stolen, 4), disturbed)
            )
            if seconds > self.args.slow_sample:
                self.slow.add((row, name))
                return
            if not disturbed:
                return

    def _give_up(self, row: str, name: str, error: PeerError) -> None:
        """Keeps the row's samples so far; the peer's other rows continue while its process is alive."""
        self.console.print(f"{name}: {row}: {error}", markup=False)
        taken = len(self.samples.get((row, name), []))
        self.not_run[row, name] = f"after {taken} samples: {error}" if taken else str(error)

    def report(self) -> Report:
        """Returns a report in which each row of AdaptRT is compared with every peer and with the machine."""
        figures = {key: Figure(ROWS[key[0]].unit, samples) for key, samples in self.samples.items()}
        limits, machine = self.limits.figures(), describe_machine(self.args.threads)
        rows = []
        for (row, name), figure in sorted(figures.items(), key=_place):
            about = self.about[name]
            source = source_of_peers(row)
            details = {"versions": about["versions"], "note": about["notes"].get(row, ""), "peers_of": source}
            theirs = {peer: other for (of, peer), other in figures.items() if of == source and peer != OURS == name}
            target = target_of_row(row, self.model, amx=machine["amx"])
            comparisons = compared(row, figure, theirs, work_of_row(row, self.model), limits, target)
            rows.append(Row(f"{row}/{name}", ROWS[row].title, row, name, details, figure, comparisons=comparisons))
        return Report(
            version=__version__,
            created=utc_now(),
            machine=machine,
            run={**{name: getattr(self.args, name) for name in SETTINGS}, "scenarios": "bench/peers"},
            scenario_file="",
            limits=limits,
            rows=rows,
            not_run=[NotRun(f"{row}/{name}", ROWS[row].title, reason) for (row, name), reason in self.not_run.items()],
        )


def is_asked(row: str, name: str) -> bool:
    """True if this engine is measured in the row, or in the row whose samples it shares."""
    return name == OURS or source_of_peers(row) == row


def in_order(peers: list[Peer], number: int) -> list[Peer]:
    """Order of the peers in round `number`: forward in even rounds, backward in odd ones."""
    return peers if number % 2 == 0 else peers[::-1]


def compared(
    row: str,
    figure: Figure,
    theirs: dict[str, Figure],
    work: Work | None,
    limits: dict[str, Figure],
    target: Target | None,
) -> list[ComparisonResult]:
    """Comparisons of a peer's row: with the machine if its `work` is known, and with `theirs` and the target."""
    results, at_limit = [], None
    if work is not None:
        peak = peak_of_row(row, {name: limit.median for name, limit in limits.items()})
        machine = (work, ROWS[row].tokens, limits["read_bandwidth"], limits[peak], peak)
        share = roofline_shares(figure, *machine).median
        results.append(ComparisonResult(None, "roofline", share, None, None, None))
        at_limit = rates_at_limit(figure, *machine)
    base = source_of_peers(row)
    return results + [
        _against_peer(f"{base}/{peer}", figure, other, target if target and target.is_for(peer) else None, at_limit)
        for peer, other in theirs.items()
    ]


def _against_peer(
    base: str, figure: Figure, theirs: Figure, target: Target | None, at_limit: Figure | None
) -> ComparisonResult:
    """Compares a figure with a peer's. With a target, the result includes the ratio at the machine's limit: if that is
    below the target, the target cannot be reached.
    """
    ratio = paired_ratio(figure, theirs)
    if target is None:
        return ComparisonResult(base, "ratio", ratio, None, None, None)
    most = None if at_limit is None else paired_ratio(at_limit, theirs)
    return ComparisonResult(base, "ratio", ratio, target.at_least, None, ratio >= target.at_least, at_limit=most)


def _place(item: tuple[tuple[str, str], Figure]) -> tuple[int, int]:
    row, name = item[0]
    return list(ROWS).index(row), PEERS.index(name)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="directory given to install.sh")
    parser.add_argument("--model", choices=list(MODELS), default="0.5b")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all rows of the model")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--new_tokens", type=int, default=48, help="new tokens of a request in decode rows")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet_share", type=float, default=0.06)
    parser.add_argument("--quiet_wait", type=float, default=30.0)
    parser.add_argument(
        "--extra_samples",
        type=int,
        default=1,
        help="maximum extra samples per row and round, in place of disturbed ones",
    )
    parser.add_argument(
        "--slow_sample", type=float, default=15.0, metavar="SECONDS",
        help="rows of a peer whose first sample takes longer are sampled in every second round only",
    )  # fmt: skip
    parser.add_argument(
        "--patience",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="maximum seconds for an answer; a slower peer is ended",
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    args.home = args.home.resolve()
    has = rows_of(MODELS[args.model])
    if missing := [row for row in args.rows or [] if row not in has]:
        parser.error(f"{args.model} has no row {missing[0]}; expected one of {', '.join(has)}")
    args.rows = args.rows or has
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    args, console = parse(argv), Console(width=TABLE_WIDTH)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # Exits normally, so that the peers end as well.
    root = make_model(args.model, args.home)
    run = Run(args, MODELS[args.model], console, LimitMeter(CpuLimits(args.threads), args.quiet_share))
    run.measure(root)
    report = run.report()
    if args.output is not None:
        report.save(args.output)
    console.print(table_of(report))
    for reason, names in reasons_not_run(report).items():
        console.print(f"not run: {', '.join(names)}: {reason}", markup=False)
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, args.plot)


if __name__ == "__main__":
    main()
