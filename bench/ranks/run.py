"""Compares ranks with one process: `python bench/ranks/run.py MODEL WORK_DIR [--ranks 2] [--stages 1] [--threads 2]`.

With `--fully_sharded_loras`, compares ranks that split both adapter matrices with ranks that split one.

MODEL is a Hugging Face directory. Its engines with one rank and with `--ranks` are built in WORK_DIR once. Rounds
alternate between one process with all threads and ranks that divide the threads. The ranks are tensor-parallel, or form
`--stages` pipeline stages; `--ranks` must be a multiple of `--stages`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig

SAMPLE = Path(__file__).with_name("sample.py")


def main() -> None:
    """Prints the medians of both, and the median ratio of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fully_sharded_loras", action="store_true")
    options = parser.parse_args()
    whole = build_engine(options.model, options.work_dir, 1, 1)
    cut = build_engine(options.model, options.work_dir, options.ranks, options.stages)
    sides: dict[str, tuple[int, Path]] = {"in one process": (1, whole), f"in {options.ranks}": (options.ranks, cut)}
    if options.fully_sharded_loras:
        sharded = build_engine(options.model, options.work_dir, options.ranks, options.stages, fully_sharded=True)
        sides = {"with one matrix cut": (options.ranks, cut), "with both": (options.ranks, sharded)}
    rounds: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(options.repeats):
        pair = [_sample(ranks, engine, whole, options.threads // ranks) for ranks, engine in sides.values()]
        for row in pair[0]:
            rounds.setdefault(row, []).append(tuple(side[row] for side in pair))
    for row, pairs in rounds.items():
        medians = zip(sides, (statistics.median(side) for side in zip(*pairs, strict=True)), strict=True)
        ratio = statistics.median(second / first for first, second in pairs)
        print(f"{row:34} " + ", ".join(f"{median:7.1f} tok/s {side}" for side, median in medians) + f": {ratio:.0%}")


def build_engine(model: Path, work_dir: Path, ranks: int, stages: int, *, fully_sharded: bool = False) -> Path:
    """The model's engine for these ranks and stages in `work_dir`; built if it does not exist."""
    engine = work_dir / f"engine{ranks}-{stages}{'-sharded' if fully_sharded else ''}"
    if not engine.is_dir():
        work_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = work_dir / f"checkpoint{ranks}-{stages}"
        if not checkpoint.is_dir():
            convert_checkpoint(model, checkpoint, tp_size=ranks // stages, pp_size=stages)
        config = BuildConfig(
            max_batch_size=16,
            max_num_tokens=2048,
            max_seq_len=1024,
            lora_config=LoraBuildConfig(fully_sharded_loras=fully_sharded),
            plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
        )
        build(checkpoint, config, engine)
    return engine


def _sample(ranks: int, engine: Path, whole: Path, threads: int) -> dict[str, float]:
    launch = [] if ranks == 1 else [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)]
    command = [*launch, sys.executable, str(SAMPLE), str(engine), str(whole), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
