"""Measures what adapters that are not in memory cost others: gaps between tokens, and the first token of new requests.

    python bench/serving/cold_adapters.py HOME [--repeats 5] [--variant NAME FLAGS ...] [--output report.json]

HOME gets a model of 0.5 billion random weights and its adapters. Streams with small adapters run all the time. Then
large adapters are asked for at once: never ("none"), while they are in memory ("warm"), and after they were unloaded
and their files left the page cache ("cold"). The three take turns in each round. "warm" shows what the requests cost
without the loads.

Each --variant NAME FLAGS starts one more server with these flags, for example --variant steps "--max_step_tokens 40".
The servers take turns too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import numpy as np
from client import OpenStream, Stream, open_stream
from rich.console import Console
from rich.table import Table
from servers import BASE, Server

from adaptrt import __version__
from adaptrt.builder.cli import main as command_line
from adaptrt.tools.bench.noise import NoiseMeter, wait_until_quiet
from adaptrt.tools.bench.report import Figure, Report, Row, Sample, paired_ratio
from adaptrt.tools.bench.system import describe_machine, utc_now
from adaptrt.tools.bench.workload import random_prompt
from scenarios.model import BenchModel, write_model
from scenarios.peft_adapter import write_peft_adapter
from scenarios.tokenizer import write_tokenizer

MODEL = BenchModel()
HOT_RANK, COLD_RANK = 16, 80
"""An adapter of rank 80 has 98.6 million bytes."""
NONE, WARM, COLD = "none", "warm", "cold"
GAP, FIRST, LOADED, ALL_LOADED = "p99-gap", "first", "large-first", "large-last"
MAX_TOKENS = 2048
BEGUN_PIECES, PROBE_SECONDS, LARGE_TOKENS = 4, 0.4, 4
"""Pieces of each stream before the large adapters are asked for; seconds from one probe to the next; tokens of a
request with a large adapter."""
Key: TypeAlias = tuple[str, str, str]
"""Kind of a figure, name of the variant, and arrangement."""
TARGETS = {GAP: 1.5, FIRST: 1.2}
"""Targets: maximum ratios of cold to none."""


@dataclass(frozen=True)
class Place:
    """The engine, and the adapters by name."""

    engine: Path
    root: Path
    hot: tuple[str, ...]
    large: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """Times of one arrangement, in seconds."""

    gaps: tuple[float, ...]
    """Gaps between the tokens of the streams while the large adapters' first tokens were awaited."""
    probes: tuple[float, ...]
    """First tokens of new requests for small adapters."""
    large: tuple[float, ...]
    """First tokens of the large adapters."""

    def values(self) -> dict[str, float]:
        """The figures by kind."""
        found = {GAP: float(np.percentile(self.gaps, 99)), FIRST: statistics.median(self.probes)}
        if self.large:
            found |= {LOADED: statistics.median(self.large), ALL_LOADED: max(self.large)}
        return found


def make_place(home: Path, num_hot: int, num_large: int) -> Place:
    """Creates the files; existing ones are kept."""
    base, engine, root = home / "base", home / "engine", home / "adapters"
    if not base.exists():
        write_model(MODEL, base)
        write_tokenizer(MODEL.vocab_size, base)
    if not engine.exists():
        flags = [
            "--dtype", "bfloat16", "--max_batch_size", "64", "--max_seq_len", str(MAX_TOKENS), "--max_num_tokens",
            "2048", "--max_lora_rank", str(COLD_RANK), "--lora_plugin", "auto",
        ]  # fmt: skip
        if command_line(["build", "--model_dir", str(base), "--output_dir", str(engine), *flags]) != 0:
            raise SystemExit(2)
    names: dict[int, tuple[str, ...]] = {}
    for rank, count in ((HOT_RANK, num_hot), (COLD_RANK, num_large)):
        names[rank] = tuple(f"rank{rank}-{number}" for number in range(count))
        for number, name in enumerate(names[rank]):
            if not (root / name).exists():
                write_peft_adapter(MODEL, base, root / name, rank, seed=rank + number, dora=False)
    return Place(engine, root, names[HOT_RANK], names[COLD_RANK])


class ColdAdapters:
    """The server, its streams, and the requests of one arrangement after the other."""

    def __init__(self, place: Place, args: argparse.Namespace, name: str, flags: Sequence[str]) -> None:
        """Starts the server. name: for its log. flags: of `adaptrt serve`, in addition to the bench's own."""
        self._place, self._args = place, args
        self._generator = np.random.default_rng(0)
        large_bytes = (place.root / place.large[0] / "adapter_model.safetensors").stat().st_size
        command = [
            sys.executable, "-m", "adaptrt.builder.cli", "serve", str(place.engine), "--port", "0",
            "--served_model_name", BASE, "--num_threads", str(args.threads), "--adapter_root", str(place.root),
            "--enable_lora_loading", "--host_cache_bytes", str(2 * (len(place.large) + 1) * large_bytes),
            *flags,
        ]  # fmt: skip
        self.server = Server(command, None, args.home / f"serve{name}.log", {})

    def measure(self, arrangement: str) -> Seen:
        """Runs one arrangement."""
        if arrangement == WARM:
            asyncio.run(self._ask_each(self._place.large))
        elif arrangement == COLD:
            self._make_cold()
        return asyncio.run(self._measure(() if arrangement == NONE else self._place.large))

    def _make_cold(self) -> None:
        """Unloads the large adapters, and removes their files from the page cache."""
        known = {card["id"] for card in httpx.get(f"{self.server.address}/v1/models").json()["data"]}
        for name in known.intersection(self._place.large):
            fields = {"lora_name": name}
            httpx.post(f"{self.server.address}/v1/unload_lora_adapter", json=fields, timeout=60).raise_for_status()
        for name in self._place.large:
            drop_pages(self._place.root / name / "adapter_model.safetensors")

    async def _ask_each(self, names: Sequence[str]) -> None:
        for name in names:
            await self._answer(name, 1)

    async def _answer(self, name: str, num_tokens: int) -> Stream:
        stream = await self._open(name, num_tokens)
        await stream.ended
        return stream.stream()

    async def _open(self, name: str, num_tokens: int) -> OpenStream:
        prompt = random_prompt(self._args.prompt_tokens, MODEL.vocab_size, self._generator)
        return await open_stream(self.server.address, name, prompt, num_tokens)

    async def _measure(self, large: Sequence[str]) -> Seen:
        await self._ask_each(self._place.hot)
        rest = MAX_TOKENS - self._args.prompt_tokens
        streams = await asyncio.gather(*(self._open(name, rest) for name in self._place.hot))
        while any(len(stream.arrivals()) < BEGUN_PIECES for stream in streams):
            await self._check(streams)
        began = asyncio.get_running_loop().time()
        requests = [asyncio.create_task(self._answer(name, LARGE_TOKENS)) for name in large]
        probes: list[Stream] = []
        while len(probes) < self._args.probes:
            await asyncio.sleep(PROBE_SECONDS)
            probes.append(await self._answer(self._place.hot[len(probes) % len(self._place.hot)], 1))
        answers = await asyncio.gather(*requests)
        while not answers and asyncio.get_running_loop().time() - began < self._args.seconds:
            await self._check(streams)
        for stream in streams:
            stream.abort()
        await asyncio.gather(*(stream.ended for stream in streams))
        end = max((answer.arrivals[0] for answer in answers), default=began + self._args.seconds)
        gaps = [
            later - earlier
            for stream in streams
            for earlier, later in pairwise(stream.arrivals())
            if began < later and earlier < end
        ]
        return Seen(tuple(gaps), tuple(probe.first for probe in probes), tuple(answer.first for answer in answers))

    async def _check(self, streams: Sequence[OpenStream]) -> None:
        """Waits for a moment. Raises RuntimeError if a stream has ended."""
        await asyncio.sleep(0.02)
        for stream in streams:
            if stream.ended.done():
                stream.stream()
                raise RuntimeError(f"a stream ended before the measurement: it has {MAX_TOKENS} tokens at most")


def drop_pages(path: Path) -> None:
    """Removes a file from the page cache, so that it is read from the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def measure(place: Place, args: argparse.Namespace, console: Console) -> dict[Key, list[Sample]]:
    """Runs all rounds; the round before the first is the warm-up."""
    samples: dict[Key, list[Sample]] = defaultdict(list)
    servers: dict[str, ColdAdapters] = {}
    try:
        for variant, flags in [("", ""), *args.variant]:
            servers[variant] = ColdAdapters(place, args, variant, [*args.server_flags, *shlex.split(flags)])
        for number in range(-1, args.repeats):
            turns = [(arrangement, variant) for arrangement in (NONE, COLD, WARM) for variant in servers]
            for arrangement, variant in turns if number % 2 == 0 else turns[::-1]:
                wait_until_quiet(args.quiet_share, args.quiet_wait)
                with NoiseMeter([one.server.process.pid for one in servers.values()]) as meter:
                    values = servers[variant].measure(arrangement).values()
                if number < 0:
                    continue
                noise = round(meter.noise.foreign, 4), round(meter.noise.stolen, 4)
                for kind, value in values.items():
                    disturbed = noise[0] > args.quiet_share
                    samples[kind, variant, arrangement].append(Sample(number, {"value": value}, *noise, disturbed))
                shown = ", ".join(f"{kind} {1000 * value:.0f} ms" for kind, value in values.items())
                console.print(f"round {number + 1}, {arrangement} {variant}: {shown}; foreign {noise[0]:.0%}")
    finally:
        for one in servers.values():
            one.server.close()
    return samples


def table_of(figures: dict[Key, Figure]) -> Table:
    """Table of kinds by variants and arrangements, with medians of the ratios of each round."""
    table = Table("figure", "variant", "arrangement", "median, ms", "spread", "to none", "to warm", "target")
    for (kind, variant, arrangement), figure in figures.items():
        ratios = [
            f"{paired_ratio(figure, figures[kind, variant, other]):.2f}"
            if other != arrangement and (kind, variant, other) in figures
            else ""
            for other in (NONE, WARM)
        ]
        target = f"{TARGETS[kind]:g}" if arrangement == COLD and kind in TARGETS else ""
        spread = f"{1000 * figure.low:.0f} to {1000 * figure.high:.0f}"
        table.add_row(kind, variant, arrangement, f"{1000 * figure.median:.0f}", spread, *ratios, target)
    return table


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("--hot", type=int, default=8, help="streams, each with its own small adapter")
    parser.add_argument("--large", type=int, default=8, help="large adapters that are asked for at once")
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--probes", type=int, default=5, help="new requests for small adapters")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the arrangement without large adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--variant", nargs=2, action="append", default=[], metavar=("NAME", "FLAGS"),
                        help="one more server, with these flags in one text")  # fmt: skip
    parser.add_argument("--server_flags", nargs=argparse.REMAINDER, default=[], help="more flags of `adaptrt serve`")
    parser.add_argument("--quiet_share", type=float, default=0.06)
    parser.add_argument("--quiet_wait", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.home = args.home.resolve()
    args.home.mkdir(parents=True, exist_ok=True)
    console = Console()
    samples = measure(make_place(args.home, args.hot, args.large), args, console)
    figures = {key: Figure("s", values) for key, values in sorted(samples.items())}
    console.print(table_of(figures))
    if args.output:
        Report(
            version=__version__,
            created=utc_now(),
            machine=describe_machine(args.threads),
            run={name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))},
            scenario_file="",
            limits={},
            rows=[
                Row(f"{kind}/{variant or 'default'}/{name}", kind, kind, name, {"variant": variant}, figure)
                for (kind, variant, name), figure in figures.items()
            ],
            not_run=[],
        ).save(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
