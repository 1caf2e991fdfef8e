"""Measures speculation where a text repeats its prompt: the demo model with the adapter that repeats text.

    python bench/speculation/repetition.py [--demo examples/demo] [--texts 40] [--window 8] [--threads N]

Each text is requested once without drafts and once with them, one request at a time; the first is the warm-up. Rates
are those of the tokens after the first response. The ratio is the median of the texts' ratios, with the middle half in
brackets.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from rounds import Round, measure, print_row
from tokenizers import Tokenizer

import adaptrt
from adaptrt.tools import demo_corpus

ADAPTER = "again"
ANSWERS = 4
MOST_TOKENS = 110


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("examples/demo"))
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    config = adaptrt.ExecutorConfig(num_threads=options.threads, iter_stats_max_iterations=MOST_TOKENS + 1)
    config.kv_cache_config.enable_block_reuse = False  # Each request computes its prompt.
    tokenizer = Tokenizer.from_file(str(options.demo / "model" / "tokenizer.json"))
    rounds: list[tuple[Round, Round]] = []
    with tempfile.TemporaryDirectory() as directory:
        engine = build_engine(options.demo / "model", Path(directory))
        with adaptrt.Executor(engine, executor_config=config) as executor:
            executor.add_adapter(ADAPTER, options.demo / "tasks" / ADAPTER)
            end = executor.engine.config.pretrained_config.eos_token_id[0]
            rng = random.Random(1)
            for _ in range(options.texts + 1):
                prompt, _ = demo_corpus.repetition(rng, ANSWERS)
                ids = tokenizer.encode(prompt).ids
                without, drafted = (
                    measure(executor, window, ADAPTER, input_token_ids=ids, max_tokens=MOST_TOKENS, end_id=end)
                    for window in (None, options.window)
                )
                rounds.append((without, drafted))
    print_row("says again", rounds[1:])


def build_engine(model: Path, directory: Path) -> Path:
    """Builds an engine in bfloat16, the demo's type."""
    checkpoint, engine = directory / "checkpoint", directory / "engine"
    for command in (
        ["convert-checkpoint", "--model_dir", model, "--output_dir", checkpoint, "--dtype", "bfloat16"],
        [
            "build",
            "--checkpoint_dir",
            checkpoint,
            "--output_dir",
            engine,
            "--lora_plugin",
            "auto",
            "--max_lora_rank",
            16,
        ],
    ):
        arguments = [str(argument) for argument in command]
        subprocess.run([sys.executable, "-m", "adaptrt.builder.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    return engine


if __name__ == "__main__":
    main()
