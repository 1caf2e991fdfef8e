"""Measures a model larger than its memory in a control group, and the cost of a budget if it fits.

    python bench/weight_memory/run.py WORK_DIR [--shape 3b|3b-relu|3b-relu-even|0.5b] [--limit 4GiB]
        [--weight_memory 3GiB] [--repeats 3] [--tokens 8] [--only NAME ...] [--peers HOME]

Creates a model with random bfloat16 weights and its engine in WORK_DIR (3b: a 3.2B Llama, 6.4 GB each); existing ones
are kept. The following ways alternate. Each runs in its own process, which starts with no page of the file in memory:

    mapped, no limit      weights are mapped, without a budget
    budget, no limit      a budget that holds all weights
    budget, limit         in a memory control group with the limit, with the budget
    mapped, limit         in the group, without a budget: the system evicts pages and reads them again
    whole, limit          relu shapes: with the budget, and an engine that reads MLPs whole
    used, limit           relu shapes: with the budget, and an engine that knows which neurons random tokens use
    llama.cpp, limit      with --peers, a directory that bench/peers/install.sh filled: llama-server with the model
    llama.cpp, no limit   mapped, in the group and without it

In the relu shapes, a ReLU with a threshold closes 90% of the gates. In 3b-relu-even all neurons are open equally often.
In 3b-relu some are open much more often, so that a quarter of the neurons makes up three quarters of the open ones.

The limit needs root and control groups of version 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

import llama_cpp
import usage

from adaptrt.builder.cli import main as adaptrt_command
from adaptrt.common.byte_size import byte_size
from scenarios.model import BenchModel, write_model


@dataclass(frozen=True)
class ReluModel(BenchModel):
    """A model whose gates are closed below hidden_act_param, as in ProSparse."""

    hidden_act: str = "fatrelu"
    hidden_act_param: float = 1.2816
    """With `spread` 0, a tenth of normally distributed gates is open."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float | npt.NDArray[np.float32]]]:
        """Tensors as in BenchModel. The deviations of the gates' rows are log-normally distributed."""
        generator = np.random.default_rng(7)
        for name, shape, deviation in super().tensors():
            if "gate_proj" in name and self.hidden_act_param > SPREAD_FROM:
                yield name, shape, np.exp(generator.standard_normal((shape[0], 1), np.float32)) * deviation
            else:
                yield name, shape, deviation


SPREAD_FROM = 1.5
"""If gates are spread, parameters are above this value."""
SIZES_3B = {
    "vocab_size": 128256, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "3b": BenchModel(**SIZES_3B),
    "3b-relu": ReluModel(**SIZES_3B, hidden_act_param=1.82),
    "3b-relu-even": ReluModel(**SIZES_3B),
    "0.5b": BenchModel(),
}
GROUPS = Path("/sys/fs/cgroup/memory")
SAMPLE = Path(__file__).with_name("sample.py")


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--limit", type=byte_size, default=byte_size("4GiB"))
    parser.add_argument("--weight_memory", type=byte_size, default=byte_size("3GiB"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--peers", type=Path, metavar="HOME")
    options = parser.parse_args()
    ways = ways_of(options)
    if options.only is not None:
        ways = {way: ways[way] for way in options.only}
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, samples in figures.items():
            samples.append(ways[way]())
            print(f"{way:>20}: {samples[-1]}", file=sys.stderr, flush=True)
    for way, samples in figures.items():
        row = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
        print(f"{way:>20}: " + "; ".join(f"{TITLES[name]} {value:.6g}" for name, value in row.items()))


TITLES = {
    "decode": "decode, tok/s",
    "decode_adapter": "with an adapter",
    "prefill": "prompt of 512 tokens, tok/s",
    "megabytes_per_token": "MB read a token",
    "peak_megabytes": "MB of memory at most",
    "seconds_to_start": "seconds to start",
}


def ways_of(options: argparse.Namespace) -> dict[str, partial[dict[str, float]]]:
    """The measurement of each way. Creates the necessary files."""
    root = options.work_dir / options.shape
    model = root / "base"
    if not (model / "config.json").is_file():
        write_model(SHAPES[options.shape], model)
    is_relu = isinstance(SHAPES[options.shape], ReluModel)
    flags = ["--weight_memory", str(options.weight_memory)] if is_relu else []
    engine = make_engine(model, root / "engine", *flags)
    size = (engine / "rank0.engine").stat().st_size
    sizes = {"engine file": size, "limit": options.limit, "budget": options.weight_memory}
    print(", ".join(f"{name} {num_bytes / 1e9:.2f} GB" for name, num_bytes in sizes.items()))
    ways = {
        "mapped, no limit": partial(sample, engine, 0, None, options.tokens),
        "budget, no limit": partial(sample, engine, 2 * size, None, options.tokens),
        "budget, limit": partial(sample, engine, options.weight_memory, options.limit, options.tokens),
        "mapped, limit": partial(sample, engine, 0, options.limit, options.tokens),
    }
    if is_relu:
        whole = make_engine(model, root / "whole-engine", "--sparse_mlp", "disable")
        used = root / "used-engine"
        if not used.is_dir():
            shutil.copytree(engine, used, copy_function=os.link)
            usage.write_usage(used, options.weight_memory)
        ways["whole, limit"] = partial(sample, whole, options.weight_memory, options.limit, options.tokens)
        ways["used, limit"] = partial(sample, used, options.weight_memory, options.limit, options.tokens)
    elif options.peers is not None:
        server = options.peers / "llama-build" / "bin" / "llama-server"
        gguf = llama_cpp.convert(SHAPES[options.shape], root, options.peers)
        for way, limit in (("llama.cpp, limit", options.limit), ("llama.cpp, no limit", None)):
            ways[way] = partial(sample_llama_cpp, server, gguf, limit, options.tokens)
    return ways


def make_engine(model: Path, engine: Path, *flags: str) -> Path:
    """Builds an engine; returns its directory."""
    if not (engine / "config.json").is_file():
        arguments = [
            "build", "--model_dir", str(model), "--output_dir", str(engine), "--dtype", "bfloat16",
            "--max_batch_size", "16", "--max_num_tokens", "512", "--max_seq_len", "2048", "--lora_plugin", "auto",
            "--max_lora_rank", "16", *flags,
        ]  # fmt: skip
        if adaptrt_command(arguments) != 0:
            raise SystemExit(1)
    return engine


def sample(engine: Path, weight_memory: int, limit: int | None, tokens: int) -> dict[str, float]:
    """Figures of one process. Raises CalledProcessError if it fails or is killed."""
    forget(engine / "rank0.engine")
    with limited(limit) as group:
        child = subprocess.run(
            [sys.executable, SAMPLE, engine, str(weight_memory), str(tokens), "" if group is None else group],
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        return with_peak(json.loads(child.stdout.splitlines()[-1]), group)


def sample_llama_cpp(server: Path, gguf: Path, limit: int | None, tokens: int) -> dict[str, float]:
    """Figures of llama-server."""
    forget(gguf)
    with limited(limit) as group:
        return with_peak(llama_cpp.measure(server, gguf, group, tokens), group)


def forget(path: Path) -> None:
    """Drops a file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def with_peak(figures: dict[str, float], group: Path | None) -> dict[str, float]:
    """Adds the group's memory use, if there is a group."""
    if group is not None:
        figures["peak_megabytes"] = int((group / "memory.max_usage_in_bytes").read_text()) / 1e6
    return figures


@contextlib.contextmanager
def limited(limit: int | None) -> Iterator[Path | None]:
    """Creates a control group with a limit, inside this process's own group; None: no limit."""
    if limit is None:
        yield None
        return
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":", 2)[1].split(","))
    group = GROUPS / own.lstrip("/") / f"weight_memory_{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
