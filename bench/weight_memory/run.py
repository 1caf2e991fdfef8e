"""A model that is larger than its memory: decoding in a control group, and what the budget costs where it fits.

    python bench/weight_memory/run.py WORK_DIR [--shape 3b|0.5b] [--limit 4GiB] [--weight_memory 3GiB] [--repeats 3]
        [--tokens 8] [--only NAME ...]

Makes a model of random bfloat16 weights and its engine below WORK_DIR (3b: a 3.2B Llama, twice 6.4 GB; what exists
stays). Rounds of these ways take turns, each in a process of its own that begins with nothing of the file in memory:

    mapped, no limit      weights are mapped, as without a budget
    budget, no limit      a budget that holds all weights
    budget, limit         in a memory control group with the limit, with the budget
    mapped, limit         in the group, without a budget: the system drops pages and reads them again

Needs root and control groups of version 1 for the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptrt.builder.byte_size import byte_size
from adaptrt.builder.cli import main as adaptrt_command
from scenarios.model import BenchModel, write_model

SHAPES = {
    "3b": BenchModel(
        vocab_size=128256, hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
        intermediate_size=8192, tie_word_embeddings=True,
    ),
    "0.5b": BenchModel(),
}  # fmt: skip
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
    options = parser.parse_args()
    engine = make_engine(options.work_dir, options.shape)
    size = (engine / "rank0.engine").stat().st_size
    ways = {
        "mapped, no limit": (0, None),
        "budget, no limit": (2 * size, None),
        "budget, limit": (options.weight_memory, options.limit),
        "mapped, limit": (0, options.limit),
    }
    sizes = {"engine file": size, "limit": options.limit, "budget": options.weight_memory}
    print(", ".join(f"{name} {num_bytes / 1e9:.2f} GB" for name, num_bytes in sizes.items()))
    figures: dict[str, list[dict[str, float]]] = {
        way: [] for way in ways if options.only is None or way in options.only
    }
    for _ in range(options.repeats):
        for way, samples in figures.items():
            samples.append(sample(engine, *ways[way], options.tokens))
    for way, samples in figures.items():
        row = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
        print(
            f"{way:>18}: decode {row['decode']:6.2f} tok/s, with an adapter {row['decode_adapter']:6.2f}; prefill of "
            f"512 {row['prefill']:6.0f} tok/s; {row['megabytes_per_token']:5.0f} MB read a token; "
            f"{row['peak_megabytes']:5.0f} MB at most; ready after {row['seconds_to_start']:.1f} s"
        )


def make_engine(work_dir: Path, shape: str) -> Path:
    """The engine's directory."""
    model, engine = work_dir / shape / "model", work_dir / shape / "engine"
    if not (model / "config.json").is_file():
        write_model(SHAPES[shape], model)
    if not (engine / "config.json").is_file():
        arguments = [
            "build", "--model_dir", str(model), "--output_dir", str(engine), "--dtype", "bfloat16",
            "--max_batch_size", "16", "--max_num_tokens", "512", "--max_seq_len", "2048", "--lora_plugin", "auto",
            "--max_lora_rank", "16",
        ]  # fmt: skip
        if adaptrt_command(arguments) != 0:
            raise SystemExit(1)
    return engine


def sample(engine: Path, weight_memory: int, limit: int | None, tokens: int) -> dict[str, float]:
    """Figures of one process. Raises CalledProcessError when it fails, or is killed."""
    with (engine / "rank0.engine").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.ExitStack() as stack:
        group = None if limit is None else stack.enter_context(memory_group(limit))
        child = subprocess.run(
            [sys.executable, SAMPLE, engine, str(weight_memory), str(tokens), "" if group is None else group],
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        figures: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
        if group is not None:
            figures["peak_megabytes"] = int((group / "memory.max_usage_in_bytes").read_text()) / 1e6
        return figures


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group with a limit, below this process's own."""
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
