"""Ranks beside one process: `python bench/ranks/run.py MODEL WORK_DIR [--ranks 2] [--stages 1] [--threads 2]`.

MODEL is a Hugging Face directory. Its engines of one rank and of so many are built below WORK_DIR, once; then rounds of
one process with all threads, and of as many ranks that share them, in turn. The ranks are those of tensor parallelism,
or of a pipeline of `--stages`, which divides their number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint

SAMPLE = Path(__file__).with_name("sample.py")


def main() -> None:
    """Prints the medians of both, and of the ratio of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    whole = build_engine(options.model, options.work_dir, 1, 1)
    cut = build_engine(options.model, options.work_dir, options.ranks, options.stages)
    rounds: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.repeats):
        one = _sample(1, whole, whole, options.threads)
        several = _sample(options.ranks, cut, whole, options.threads // options.ranks)
        for row, figure in one.items():
            rounds.setdefault(row, []).append((figure, several[row]))
    for row, pairs in rounds.items():
        one_median, several_median = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(several / one for one, several in pairs)
        print(f"{row:34} {one_median:7.1f} tok/s in one process, {several_median:7.1f} in {options.ranks}: {ratio:.0%}")


def build_engine(model: Path, work_dir: Path, ranks: int, stages: int) -> Path:
    """The model's engine of so many ranks in so many stages, below `work_dir`, built if it is not there."""
    engine = work_dir / f"engine{ranks}-{stages}"
    if not engine.is_dir():
        work_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = work_dir / f"checkpoint{ranks}-{stages}"
        if not checkpoint.is_dir():
            convert_checkpoint(model, checkpoint, tp_size=ranks // stages, pp_size=stages)
        plugins = PluginConfig(lora_plugin="auto", dora_plugin="enable")
        build(
            checkpoint,
            BuildConfig(max_batch_size=16, max_num_tokens=2048, max_seq_len=1024, plugin_config=plugins),
            engine,
        )
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
