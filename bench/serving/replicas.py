"""Compares two Ray Serve replicas with one, and with `adaptrt serve`: Zipf adapters, with and without affinity.

    python bench/serving/replicas.py HOME [--adapters 64] [--cached 20] [--requests 300] [--output report.json]

Creates a small random model, its engine and its adapters in HOME once. All arrangements have the same total number of
threads, except a single replica with half of them, which is comparable with one of two replicas. Each arrangement is
started separately and warmed up. Then a closed loop of clients asks for the same adapters in the same order. A
replica's LoRA cache holds `--cached` adapters, so the choice of replica matters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))

import httpx
import numpy as np
from client import Crowd, ask_in_turn, tokens_per_second
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from servers import BASE, Server
from tokenizers import Tokenizer, models

from adaptrt import __version__
from adaptrt.builder.cli import main as command_line
from adaptrt.serve.ray.options import DEFAULT_QUEUE_SLACK
from adaptrt.tools.bench.noise import NoiseMeter, wait_until_quiet
from adaptrt.tools.bench.report import Figure, Report, Row, Sample
from adaptrt.tools.bench.scenario_types import Popularity
from adaptrt.tools.bench.system import describe_machine, utc_now
from adaptrt.tools.bench.workload import draw_adapters, random_prompt
from scenarios.model import BenchModel, write_model
from scenarios.peft_adapter import write_peft_adapter
from support.ray_application import ray_serve, run_application

MODEL = BenchModel(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408,
    tie_word_embeddings=True,
)  # fmt: skip
RANK, MAX_TOKENS = 16, 512
BYTES_PER_NUMBER = 2
KINDS = ("rate", "first", "host_hits", "device_hits")


@dataclass(frozen=True)
class Place:
    """The model, engine and adapters to serve."""

    engine: Path
    adapters: dict[str, Path]
    adapter_bytes: int


@dataclass
class Arrangement:
    """One way to serve, and its measurements."""

    name: str
    serve: Callable[[], contextlib.AbstractContextManager[str]]
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def make_place(home: Path, num_adapters: int) -> Place:
    """Creates the files; existing ones are kept."""
    base, engine = home / "base", home / "engine"
    if not base.exists():
        write_model(MODEL, base)
        vocabulary = {f" w{number}": number for number in range(MODEL.vocab_size)}
        Tokenizer(models.WordLevel(vocabulary, unk_token=" w0")).save(str(base / "tokenizer.json"))
    if not engine.exists():
        flags = [
            "--max_batch_size", "64", "--max_seq_len", str(MAX_TOKENS), "--max_num_tokens", "2048", "--max_lora_rank",
            str(RANK), "--lora_plugin", "auto",
        ]  # fmt: skip
        if command_line(["build", "--model_dir", str(base), "--output_dir", str(engine), *flags]) != 0:
            raise SystemExit(2)
    adapters = {f"adapter{number:03d}": home / "adapters" / f"adapter{number:03d}" for number in range(num_adapters)}
    for number, directory in enumerate(adapters.values()):
        if not directory.exists():
            write_peft_adapter(MODEL, base, directory, RANK, seed=number, dora=False)
    numbers = (next(iter(adapters.values())) / "adapter_model.safetensors").stat().st_size // BYTES_PER_NUMBER
    return Place(engine, adapters, numbers * BYTES_PER_NUMBER)


@contextlib.contextmanager
def one_process(place: Place, args: argparse.Namespace) -> Iterator[str]:
    """Starts `adaptrt serve`."""
    command = [
        sys.executable, "-m", "adaptrt.builder.cli", "serve", str(place.engine), "--port", "0", "--served_model_name",
        BASE, "--num_threads", str(args.threads), "--adapter_root", str(args.home / "adapters"), "--host_cache_bytes",
        str(args.cached * place.adapter_bytes),
    ]  # fmt: skip
    server = Server(command, None, args.home / "serve.log", {})
    try:
        yield server.address
    finally:
        server.close()


@contextlib.contextmanager
def replicas(
    place: Place,
    args: argparse.Namespace,
    count: int,
    *,
    threads: int | None = None,
    affinity: bool = True,
    queue_slack: int = DEFAULT_QUEUE_SLACK,
) -> Iterator[str]:
    """Starts the Ray Serve application. `threads`: per replica; None divides all threads among the replicas."""
    with ray_serve(num_cpus=args.threads) as address:
        fields = {
            "model": str(place.engine), "served_model_name": BASE, "num_threads": threads or args.threads // count,
            "num_replicas": count, "adapter_affinity": affinity, "adapter_queue_slack": queue_slack,
            "max_adapters_per_replica": args.cached,
            "max_ongoing_requests": args.max_ongoing_requests, "adapter_root": str(args.home / "adapters"),
            "host_cache_bytes": args.cached * place.adapter_bytes,
        }  # fmt: skip
        run_application("bench", fields)
        yield f"{address}/bench"


def lookups(address: str) -> dict[tuple[str, str], float]:
    """Cache lookups by level and outcome, summed over all replicas."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{address}/metrics", timeout=60).text):
        for sample in family.samples:
            for outcome in ("hits", "misses"):
                if sample.name == f"adaptrt_lora_cache_{outcome}_total":
                    key = sample.labels["level"], outcome
                    found[key] = found.get(key, 0.0) + sample.value
    return found


def hit_rate(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], level: str) -> float:
    """Hit rate between two snapshots."""
    hits, misses = (after[level, outcome] - before.get((level, outcome), 0.0) for outcome in ("hits", "misses"))
    return hits / (hits + misses)


def crowd_of(place: Place, args: argparse.Namespace, seed: int) -> Crowd:
    """The requests; the same for each arrangement."""
    generator = np.random.default_rng(seed)
    drawn = draw_adapters(generator, args.requests, len(place.adapters), Popularity(zipf=args.zipf))
    assert drawn is not None
    names = list(place.adapters)
    prompts = [random_prompt(args.prompt_tokens, MODEL.vocab_size, generator) for _ in range(args.requests)]
    return Crowd([names[number] for number in drawn], prompts, args.new_tokens)


def measure(arrangement: Arrangement, place: Place, args: argparse.Namespace, console: Console) -> None:
    """Runs all rounds; the round before the first is the warm-up."""
    with arrangement.serve() as address:
        for number in range(-1, args.repeats):
            crowd = crowd_of(place, args, seed=number + 1)
            wait_until_quiet(args.quiet_share, args.quiet_wait)
            before = lookups(address)
            # Servers count as foreign processes here, so stolen CPU time is the only meaningful noise.
            with NoiseMeter() as meter:
                streams = ask_in_turn(address, crowd, args.streams)
            after = lookups(address)
            if number < 0:
                continue
            values = {
                "rate": tokens_per_second(streams),
                "first": statistics.median(stream.first for stream in streams),
                "host_hits": hit_rate(before, after, "host"),
                "device_hits": hit_rate(before, after, "device"),
            }
            for kind, value in values.items():
                arrangement.samples[kind].append(Sample(number, {"value": value}, 0.0, meter.noise.stolen, False))
            shown = ", ".join(f"{kind} {value:.4g}" for kind, value in values.items())
            console.print(f"{arrangement.name}, round {number + 1}: {shown}")


def figures(arrangement: Arrangement) -> dict[str, Figure]:
    """Figures by kind."""
    units = {"rate": "tok/s", "first": "s", "host_hits": "of 1", "device_hits": "of 1"}
    return {kind: Figure(units[kind], samples) for kind, samples in arrangement.samples.items()}


def report_of(arrangements: list[Arrangement], args: argparse.Namespace) -> Report:
    """Figures over all rounds."""
    return Report(
        version=__version__,
        created=utc_now(),
        machine=describe_machine(args.threads),
        run={name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))},
        scenario_file="",
        limits={},
        rows=[
            Row(f"{kind}/{arrangement.name}", kind, kind, arrangement.name, {}, figure)
            for arrangement in arrangements
            for kind, figure in figures(arrangement).items()
        ],
        not_run=[],
    )


def table_of(arrangements: list[Arrangement]) -> Table:
    """Table of arrangements by kinds."""
    table = Table("arrangement", "tok/s", "first token, ms", "found on the host level", "on the device level")
    for arrangement in arrangements:
        found = figures(arrangement)
        rate, first = found["rate"], found["first"]
        table.add_row(
            arrangement.name,
            f"{rate.median:.0f} ({rate.low:.0f} to {rate.high:.0f})",
            f"{1000 * first.median:.0f}",
            f"{found['host_hits'].median:.1%}",
            f"{found['device_hits'].median:.1%}",
        )
    return table


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--cached", type=int, default=20, help="maximum adapters in a replica's LoRA cache")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=300, help="of a round")
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests")
    parser.add_argument("--max_ongoing_requests", type=int, default=16, help="of a replica")
    parser.add_argument("--queue_slacks", type=int, nargs="*", default=[], help="beside the default")
    parser.add_argument("--only", nargs="*", help="names of the arrangements to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of all replicas together"
    )
    parser.add_argument("--quiet_share", type=float, default=0.1)
    parser.add_argument("--quiet_wait", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.cached <= args.streams:
        parser.error(
            f"--cached is {args.cached}; expected more than --streams {args.streams}, because each stream may need "
            "another adapter"
        )
    args.home = args.home.resolve()
    console = Console()
    place = make_place(args.home, args.adapters)
    arrangements = [
        Arrangement("adaptrt serve", lambda: one_process(place, args)),
        Arrangement("one replica", lambda: replicas(place, args, 1)),
        Arrangement("one replica, half the threads", lambda: replicas(place, args, 1, threads=args.threads // 2)),
        Arrangement("two replicas", lambda: replicas(place, args, 2)),
        *(
            Arrangement(f"two with a slack of {slack}", partial(replicas, place, args, 2, queue_slack=slack))
            for slack in args.queue_slacks
        ),
        Arrangement("two without affinity", lambda: replicas(place, args, 2, affinity=False)),
    ]
    if args.only is not None:
        arrangements = [arrangement for arrangement in arrangements if arrangement.name in args.only]
    for arrangement in arrangements:
        measure(arrangement, place, args, console)
    console.print(table_of(arrangements))
    if args.output:
        report_of(arrangements, args).save(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
