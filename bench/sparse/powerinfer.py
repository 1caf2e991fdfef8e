"""Compares PowerInfer on a CPU with AdaptRT: one ReLU model with 90% closed gates, with and without predictors.

    python bench/sparse/powerinfer.py WORK_DIR --home HOME [--rounds 3] [--threads N] [--output FILE]

HOME is the directory given to bench/sparse/install.sh. Creates the model of model.py in WORK_DIR, its engines, and
PowerInfer's files; existing ones are kept. A round starts each of PowerInfer's two servers, then measures AdaptRT's
three engines, one request each: a prompt of 512 random tokens, and decoding after one of 128. PowerInfer's times are
those that its server reports. Samples disturbed by other programs are repeated a few times. With --output, samples are
added to those in the file, and medians are over all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from convert import DENSE, SPARSE, convert
from llama_server import Times, started
from model import write_relu_model
from models import write_tokenizer
from quantised.run import Speed, speeds_of

from adaptrt.tools.bench.noise import NoiseMeter
from scenarios.model import BenchModel

PROMPT, CONTEXT, GENERATED = 512, 128, 32
POWERINFER = {"PowerInfer, predictors": SPARSE, "PowerInfer, dense": DENSE}
ENGINES: dict[str, tuple[str, list[str]]] = {
    "AdaptRT, predictors": ("engine-predictors", ["--sparse_predictors", "PREDICTORS"]),
    "AdaptRT, exact": ("engine-exact", ["--sparse_mlp", "auto"]),
    "AdaptRT, dense": ("engine-dense", ["--sparse_mlp", "disable"]),
}
QUIET_SHARE, TRIES = 0.06, 4
Sample = tuple[float, float]
Result = TypeVar("Result")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="0: make what is needed, measure nothing")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file for the samples, as JSON")
    options = parser.parse_args(arguments)
    engines = prepared(options.work_dir, options.home)
    samples: dict[str, list[Sample]] = {name: [] for name in (*POWERINFER, *ENGINES)}
    if options.output is not None and options.output.exists():
        samples = json.loads(options.output.read_text())
    for _ in range(options.rounds):
        for name, sample in round_of(options, engines):
            samples[name].append(sample)
        if options.output is not None:
            options.output.write_text(json.dumps(samples, indent=2) + "\n")
    print_medians(samples)
    return 0


def prepared(work_dir: Path, home: Path) -> dict[str, Path]:
    """The engines; built if they do not exist."""
    model, predictors = work_dir / "relu", work_dir / "predictors"
    if not (model / "config.json").exists():
        shares = write_relu_model(BenchModel(), model, predictors)
        print(
            f"of another text's neurons {shares.open:.2%} are open, predictors expect {shares.expected:.2%}, "
            f"{shares.open_unexpected:.3%} are open against them",
            flush=True,
        )
        write_tokenizer(BenchModel(), model)
    engines = {}
    for name, (folder, flags) in ENGINES.items():
        engines[name] = work_dir / folder
        if not (engines[name] / "config.json").exists():
            command = [
                sys.executable, "-m", "adaptrt.builder.cli", "build", "--model_dir", model, "--dtype", "bfloat16",
                "--output_dir", engines[name], "--max_batch_size", 1, "--max_num_tokens", 1024, "--max_seq_len", 1024,
                *(predictors if flag == "PREDICTORS" else flag for flag in flags),
            ]  # fmt: skip
            subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    convert(home, model, predictors, work_dir / "gguf")
    return engines


def round_of(options: argparse.Namespace, engines: dict[str, Path]) -> Iterator[tuple[str, Sample]]:
    """Yields (name, tokens per second of decoding and of a prompt) of everything."""
    for name, file in POWERINFER.items():
        yield name, of_powerinfer(options, options.work_dir / "gguf" / file)

    def speeds() -> list[tuple[str, Speed]]:
        return list(speeds_of(engines, 1, options.threads))

    for name, speed in undisturbed(speeds):
        print(f"{name}: {speed.megabytes_per_token:.0f} MB a token", flush=True)
        yield name, (speed.decode, speed.prefill)


def of_powerinfer(options: argparse.Namespace, model: Path) -> Sample:
    """Sample of a new server, whose first request is the warm-up."""
    random = np.random.default_rng()
    command = [
        options.home / "powerinfer" / "build" / "bin" / "server", "-m", model, "-c", 1024, "-b", PROMPT,
        "-t", options.threads,
    ]  # fmt: skip
    with started(command, "props") as server:

        def measure(length: int, tokens: int) -> Times:
            return server.measure(random.integers(100, 20000, length).tolist(), tokens)

        measure(CONTEXT, 1)
        prefill = undisturbed(lambda: measure(PROMPT, 1), server.process).prefill
        token = undisturbed(lambda: measure(CONTEXT, GENERATED), server.process).token
    return 1 / token, PROMPT / prefill


def undisturbed(measure: Callable[[], Result], *processes: int) -> Result:
    """Runs `measure` until other programs than `processes` use almost no CPU, at most TRIES times. Returns the last
    result."""
    for _ in range(TRIES):
        with NoiseMeter(processes) as meter:
            result = measure()
        if meter.noise.foreign <= QUIET_SHARE:
            return result
    print(f"other programs took {meter.noise.foreign:.0%} of the CPUs", flush=True)
    return result


def print_medians(samples: dict[str, list[Sample]]) -> None:
    """Prints one line for each name."""
    print(f"{'':24} {'decode':>8} {'prompt of 512':>14}, tok/s (from, to)")
    for name, found in samples.items():
        columns = [
            f"{statistics.median(values):8.1f} ({min(values):.1f}, {max(values):.1f})"
            for values in zip(*found, strict=True)
        ]
        print(f"{name:24} {' '.join(columns)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
