"""Runs AdaptRT and its peers on one model, interleaved, and writes one report, one table and one plot.

    python bench/peers/run.py --home DIR [--model 0.5b] [--peers ...] [--rows ...] [--output report.json] [--plot p.png]

HOME holds the virtual environments that install.sh made, and the models. A peer's process lives through the whole run;
it is stopped (SIGSTOP) while another is measured, so that threads that spin take no part of the CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import MODELS, export_for, make_model
from rich import box
from rich.console import Console
from rich.table import Table

from adaptrt import __version__
from adaptrt._core import measure_machine_limits
from adaptrt.tools.bench.display import number
from adaptrt.tools.bench.model import BenchModel
from adaptrt.tools.bench.noise import NoiseMeter, wait_until_quiet
from adaptrt.tools.bench.report import ComparisonResult, Figure, NotRun, Report, Row, Sample, paired_ratio
from adaptrt.tools.bench.system import describe_machine, utc_now

HERE = Path(__file__).parent
PEERS = ("adaptrt", "peft", "llama_cpp", "openvino", "vllm")
OURS = "adaptrt"
ROWS = {
    "prefill-512": ("prefill, 512 tokens", "tok/s"),
    "decode-1": ("decode, 1 request", "tok/s"),
    "decode-16": ("decode, 16 requests", "tok/s"),
    "decode-1-lora": ("decode, 1 request, rank-16 adapter", "tok/s"),
    "mixed-16": ("16 requests, 16 adapters, prompts included", "tok/s"),
    "adapter-load": ("adapter of rank 16 from disk", "s"),
    "decode-1-dora": ("decode, 1 request, DoRA", "tok/s"),
    "mixed-16-dora": ("16 requests, 8 LoRA and 8 DoRA, prompts included", "tok/s"),
}
LIMIT_ROUNDS = 2
BYTES_PER_WEIGHT = 2


class PeerError(Exception):
    """A peer could not be started, or did not answer."""


class Worker:
    """A peer's process."""

    def __init__(self, name: str, root: Path, args: argparse.Namespace) -> None:
        python = sys.executable if name == OURS else str(args.home / f"venv-{name}" / "bin" / "python")
        if not Path(python).exists():
            raise PeerError(f"not installed; bench/peers/install.sh HOME {name} does it")
        export_for(name, root, args.home)
        threads = str(args.threads)
        environment = {
            **os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false",
            "LLAMA_SERVER": str(args.home / "llama-build" / "bin" / "llama-server"),
        }  # fmt: skip
        self._log = (args.home / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / f"{name}_peer.py"), "--root", str(root), "--threads", threads,
             "--new_tokens", str(args.new_tokens)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.about = self._answer()

    def measure(self, row: str) -> tuple[dict[str, float], NoiseMeter]:
        """A sample of a row, and what else the machine did. The process runs for its duration only."""
        assert self._process.stdin is not None
        self.resume()
        try:
            with NoiseMeter(self.processes()) as meter:
                self._process.stdin.write(json.dumps({"row": row}) + "\n")
                self._process.stdin.flush()
                metrics = self._answer()["metrics"]
        finally:
            self.pause()
        return metrics, meter

    def pause(self) -> None:
        """Stop the process and its children."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def processes(self) -> list[int]:
        """Ids of the process and its children."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def close(self) -> None:
        """End the process, if it has not ended."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self.resume()
            self._process.stdin.close()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"its process ended with status {self._process.wait()}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


@dataclass
class Run:
    """Everything that is measured, by peer and row."""

    args: argparse.Namespace
    model: BenchModel
    workers: dict[str, Worker] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    limits: dict[str, list[Sample]] = field(default_factory=dict)
    not_run: dict[tuple[str, str], str] = field(default_factory=dict)

    def start(self, root: Path, console: Console) -> None:
        """Start the peers one after another; each is stopped when it is ready."""
        for name in self.args.peers:
            console.print(f"starting {name}")
            try:
                worker = Worker(name, root, self.args)
            except (PeerError, subprocess.CalledProcessError, OSError, StopIteration) as error:
                reason = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
                self.not_run.update({(row, name): reason for row in self.args.rows})
                continue
            worker.pause()
            self.workers[name] = worker
            for row in self.args.rows:
                if row in worker.about["refused"]:
                    self.not_run[row, name] = worker.about["refused"][row]

    def measure(self, console: Console) -> None:
        """A warm-up of everything, then round after round."""
        for number_of_round in range(-1, self.args.repeats):
            console.print(
                "warming up" if number_of_round < 0 else f"round {number_of_round + 1} of {self.args.repeats}"
            )
            if number_of_round >= 0:
                self._measure_limits(number_of_round)
            for row in self.args.rows:
                for name, worker in list(self.workers.items()):
                    if (row, name) not in self.not_run:
                        self._measure_one(row, name, worker, number_of_round)

    def _measure_one(self, row: str, name: str, worker: Worker, number_of_round: int) -> None:
        tries = 1 if number_of_round < 0 else 1 + self.args.extra_samples
        for _ in range(tries):
            if number_of_round >= 0:
                wait_until_quiet(self.args.quiet_share, self.args.quiet_wait)
            try:
                metrics, meter = worker.measure(row)
            except PeerError as error:
                self.not_run[row, name] = str(error)
                self.samples.pop((row, name), None)
                return
            if number_of_round < 0:
                return
            sample = self._made(number_of_round, metrics, meter)
            self.samples.setdefault((row, name), []).append(sample)
            if not sample.disturbed:
                return

    def _measure_limits(self, number_of_round: int) -> None:
        with NoiseMeter() as meter:
            limits = measure_machine_limits(self.args.threads, LIMIT_ROUNDS)
        for name in ("read_bandwidth", "bfloat16_flops", "float32_flops"):
            self.limits.setdefault(name, []).append(
                self._made(number_of_round, {"value": getattr(limits, name)}, meter)
            )

    def _made(self, number_of_round: int, metrics: dict[str, float], meter: NoiseMeter) -> Sample:
        noise = meter.noise
        return Sample(number_of_round, metrics, round(noise.foreign, 4), round(noise.stolen, 4),
                      noise.foreign > self.args.quiet_share)  # fmt: skip

    def report(self) -> Report:
        """With each of our rows held against every peer and the machine."""
        figures = {key: Figure(ROWS[key[0]][1], samples) for key, samples in self.samples.items()}
        limits = {
            name: Figure("B/s" if name == "read_bandwidth" else "FLOP/s", samples)
            for name, samples in self.limits.items()
        }
        rows = []
        for (row, name), figure in sorted(figures.items(), key=_place):
            comparisons = []
            share = self._share_of_limit(row, figure, limits)
            if share is not None:
                comparisons.append(ComparisonResult(None, "roofline", share, None, None, None))
            comparisons += [
                ComparisonResult(f"{row}/{peer}", "ratio", paired_ratio(figure, theirs), None, None, None)
                for (other, peer), theirs in figures.items()
                if name == OURS and other == row and peer != OURS
            ]
            about = self.workers[name].about
            details = {"versions": about["versions"], "note": about["notes"].get(row, "")}
            rows.append(Row(f"{row}/{name}", ROWS[row][0], row, name, details, figure, comparisons=comparisons))
        settings = {
            name: getattr(self.args, name)
            for name in ("model", "repeats", "new_tokens", "threads", "quiet_share", "quiet_wait", "extra_samples")
        }
        return Report(
            version=__version__,
            created=utc_now(),
            machine=describe_machine(self.args.threads),
            run={**settings, "scenarios": "bench/peers"},
            scenario_file="",
            limits=limits,
            rows=rows,
            not_run=[NotRun(f"{row}/{name}", ROWS[row][0], reason) for (row, name), reason in self.not_run.items()],
        )

    def _share_of_limit(self, row: str, figure: Figure, limits: dict[str, Figure]) -> float | None:
        """Of what the machine's limits allow for the base's weights alone, each read once a step."""
        if row not in ("prefill-512", "decode-1", "decode-16"):
            return None
        tokens = {"prefill-512": 512, "decode-1": 1, "decode-16": 16}[row]
        matrices = [shape for name, shape, _ in self.model.tensors() if len(shape) == 2 and "embed" not in name]
        weights = sum(rows * columns for rows, columns in matrices)
        head = self.model.vocab_size * self.model.hidden_size
        weights += head if self.model.tie_word_embeddings else 0
        flops = 2 * tokens * (weights if row != "prefill-512" else weights - head)
        peak = limits["bfloat16_flops"].median or limits["float32_flops"].median
        least = max(BYTES_PER_WEIGHT * weights / limits["read_bandwidth"].median, flops / peak)
        return least * figure.median / tokens


def _place(item: tuple[tuple[str, str], Figure]) -> tuple[int, int]:
    row, name = item[0]
    return list(ROWS).index(row), PEERS.index(name)


def table_of(report: Report) -> Table:
    """Rows by peers, ours in ratio to the best of them."""
    peers = [name for name in PEERS if any(row.engine == name for row in report.rows)]
    table = Table(title=f"{report.run['model']} Llama, bfloat16, {report.machine['threads']} threads",
                  box=box.SIMPLE_HEAD, title_justify="left")  # fmt: skip
    table.add_column("row", no_wrap=True)
    for name in peers:
        table.add_column(name, justify="right")
    table.add_column("of the best\npeer", justify="right")
    table.add_column("of the\nlimit", justify="right")
    for kind in dict.fromkeys(row.kind for row in report.rows):
        cells = {row.engine: row for row in report.rows if row.kind == kind}
        table.add_row(
            f"{kind}, {next(iter(cells.values())).figure.unit}",
            *(_cell(cells.get(name)) for name in peers),
            ratio_text(cells.get(OURS)),
            limit_text(cells.get(OURS)),
        )
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return number(row.figure.median) + (" *" if row.figure.is_disturbed else "")


def ratio_text(row: Row | None) -> str:
    """Ours to the best peer's: more is better, for seconds as well."""
    ratios = [c.ratio for c in row.comparisons if c.measure == "ratio"] if row is not None else []
    if row is None or not ratios:
        return "-"
    return f"{1 / max(ratios):.2f} x" if row.figure.unit == "s" else f"{min(ratios):.2f} x"


def limit_text(row: Row | None) -> str:
    """Share of the machine's limit."""
    shares = [c.ratio for c in row.comparisons if c.measure == "roofline"] if row is not None else []
    return f"{100 * shares[0]:.0f}%" if shares else "-"


def draw(report: Report, path: Path) -> None:
    """Throughput of every peer, each row on its own scale: ours is 1."""
    from matplotlib.figure import Figure as Canvas

    kinds = [kind for kind in ROWS if any(row.kind == kind and row.figure.unit == "tok/s" for row in report.rows)]
    peers = [name for name in PEERS if any(row.engine == name for row in report.rows)]
    figure = Canvas(figsize=(10.0, 1.4 + 0.55 * len(kinds)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(peers)
    colours = dict(zip(PEERS, ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#4a4e69"), strict=True))
    for position, kind in enumerate(kinds):
        for index, name in enumerate(peers):
            row = report.row(f"{kind}/{name}")
            if row is None:
                continue
            y = position + (index - (len(peers) - 1) / 2) * height
            value = row.figure.median
            error = [[value - row.figure.low], [row.figure.high - value]]
            axes.barh(y, value, height, color=colours[name], xerr=error, ecolor="#777777",
                      label=name if kind == kinds[0] else None)  # fmt: skip
            axes.annotate(number(value), (row.figure.high, y), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(kinds)), [ROWS[kind][0] for kind in kinds])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (median, lowest to highest)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    title = f"{report.run['model']} Llama, bfloat16; {report.machine['processor']}, {report.machine['threads']} threads"
    axes.set_title(f"{title}; {report.created[:10]}", loc="left", fontsize=11)
    figure.legend(frameon=False, ncols=len(peers), loc="outside lower left")
    figure.savefig(path, dpi=140)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="what install.sh was given")
    parser.add_argument("--model", choices=list(MODELS), default="0.5b")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet_share", type=float, default=0.06)
    parser.add_argument("--quiet_wait", type=float, default=60.0)
    parser.add_argument(
        "--extra_samples", type=int, default=1, help="of each row and round, in place of a disturbed one"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    args.home = args.home.resolve()
    return args


def main(argv: list[str] | None = None) -> None:
    """Do it."""
    args, console = parse(argv), Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the peers end as well
    root = make_model(args.model, args.home)
    run = Run(args, MODELS[args.model])
    try:
        run.start(root, console)
        run.measure(console)
    finally:
        for worker in run.workers.values():
            worker.close()
    report = run.report()
    if args.output is not None:
        report.save(args.output)
    console.print(table_of(report))
    for entry in report.not_run:
        console.print(f"not run: {entry.name}: {entry.reason}", markup=False)
    if args.plot is not None:
        draw(report, args.plot)


if __name__ == "__main__":
    main()
