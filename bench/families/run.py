"""Compares the families with Llama: `python bench/families/run.py WORK_DIR [--families NAME ...] [--output FILE]`.

Creates models of one size with random bfloat16 weights and their engines in WORK_DIR, if they do not exist. Each round
measures every family: a prompt of 512 tokens, one generating request, and 16 generating requests; with experts also 16
requests, each with its own adapter. The profile of a step gives the bytes that it must move and the operations that it
must do, and so its share of the roofline. The roofline's limits are measured with each sample.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from families.models import FAMILIES, write_model

from adaptrt.common.byte_size import ALL_WEIGHTS
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.executors import AdapterLibrary, CpuUse, load_native_engine
from adaptrt.tools.bench.limits import peak_of, roofline_shares
from adaptrt.tools.bench.report import Figure
from adaptrt.tools.bench.runner import Bench
from adaptrt.tools.bench.scenario_types import NO_ADAPTERS, AdapterMix, Decode, Prefill, RunSettings
from scenarios.random_adapters import RandomAdapters

EXPERT_MODULES = ("moe_h_to_4h", "moe_4h_to_h", "moe_gate")
PROMPT, CONTEXT, GENERATED, BATCH, RANK = 512, 128, 32, 16, 16


class FamilyBench(Bench):
    """One run over engines whose adapters are random adapters of their experts."""

    def library(self, engine: NativeEngine) -> AdapterLibrary:
        """The library of an engine's adapters."""
        return RandomAdapters(engine, EXPERT_MODULES)

    def shares(self) -> Iterator[tuple[str, Figure, Figure]]:
        """Yields (scenario, tokens per second, shares of the roofline)."""
        report = self.run()
        for row in report.rows:
            scenario = next(one for one in self.scenarios if one.name == row.name)
            peak = peak_of(self.engines[row.engine].program, {name: f.median for name, f in report.limits.items()})
            tokens = scenario.input_length if isinstance(scenario, Prefill) else scenario.sizes.requests
            shares = roofline_shares(
                row.figure, self.work[row.name], tokens, report.limits["read_bandwidth"], report.limits[peak], peak
            )
            yield row.name, row.figure, shares


def scenarios_of(family: str, has_experts: bool) -> list[Prefill | Decode]:
    """The scenarios of a family."""

    def decode(name: str, requests: int, adapters: AdapterMix) -> Decode:
        return Decode(
            name=f"{family}/{name}", title=f"{family}, {name}", engine=family, adapters=adapters, unit="tok/s",
            requests=requests, input_length=CONTEXT, output_length=GENERATED,
        )  # fmt: skip

    found: list[Prefill | Decode] = [
        Prefill(
            name=f"{family}/prefill", title=f"{family}, prefill", engine=family, adapters=NO_ADAPTERS, unit="tok/s",
            input_length=PROMPT,
        ),
        decode("decode 1", 1, NO_ADAPTERS),
        decode(f"decode {BATCH}", BATCH, NO_ADAPTERS),
    ]  # fmt: skip
    if has_experts:
        found.append(decode(f"decode {BATCH}, {BATCH} adapters", BATCH, AdapterMix(BATCH, (RANK,))))
    return found


def prepare(family: str, work_dir: Path) -> Path:
    """The family's engine; built if it does not exist."""
    engine, model = work_dir / family, work_dir / f"{family}-model"
    if engine.is_dir():
        return engine
    shutil.rmtree(model, ignore_errors=True)
    write_model(family, model)
    has_experts = "num_experts_per_tok" in FAMILIES[family]
    lora = ["--lora_plugin", "auto", "--max_lora_rank", str(RANK), "--lora_target_modules", *EXPERT_MODULES]
    command = [
        sys.executable, "-m", "adaptrt.builder.cli", "build", "--model_dir", str(model), "--output_dir", str(engine),
        "--max_batch_size", str(BATCH), "--max_num_tokens", "1024", "--max_seq_len", "1024",
        *(lora if has_experts else []),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(model)
    return engine


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path, help="directory of the engines; missing ones are built")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args(arguments)
    engines, scenarios = {}, []
    for family in args.families:
        # Weights are read into the process's memory, because the page layout of a mapped file changes over time.
        engines[family] = load_native_engine(prepare(family, args.work_dir), ALL_WEIGHTS)
        scenarios += scenarios_of(family, "num_experts_per_tok" in FAMILIES[family])
    settings = RunSettings(repeats=args.repeats, quiet_share=0.06, extra_samples=0, quiet_wait=0.0)
    bench = FamilyBench(args.work_dir, scenarios, settings, engines, CpuUse(args.threads, ""), print)
    made = {}
    for name, figure, shares in bench.shares():
        print(f"{name:40} {figure.median:8.1f} tok/s  {100 * shares.median:5.1f}% of the roofline")
        made[name] = {"tokens_per_second": figure.median, "roofline_share": shares.median}
    if args.output is not None:
        args.output.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
