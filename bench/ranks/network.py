"""Ranks on two hosts: `python bench/ranks/network.py MODEL WORK_DIR [--stages 2] [--repeats 3]`.

MODEL is a Hugging Face directory of a dense decoder. Two ranks, of tensor parallelism or of a pipeline of two stages,
run in two network namespaces over links of several delays and rates (slow_link.py), in turn. Beside what is measured
stands what a model of bytes and latency makes of the step over the fastest link: it is that of projection.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from run import SAMPLE, build_engine
from sample import BATCH, PROMPT
from slow_link import ADDRESSES, NAMESPACES, Link, launcher, two_hosts

FASTEST = Link("none added", 0.0, 0.0)
LINKS = (FASTEST, Link("0.1 ms, 10 Gbit/s", 1e-4, 1.25e9), Link("1 ms, 1 Gbit/s", 1e-3, 1.25e8))
ROWS = {"prefill, 512 tokens": PROMPT, "decode, 1 request": 1, "decode, 16 requests": BATCH}
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Exchanges:
    """What ranks say to each other in a step."""

    messages: int
    """One after another: each costs the link's delay."""
    num_bytes: int
    """In one direction, while nothing is computed."""

    def seconds(self, link: Link) -> float:
        """Beyond a step without a network."""
        return self.messages * link.delay + (self.num_bytes / link.rate if link.rate else 0.0)


def exchanges(config: dict[str, int], stages: int, rows: int, logit_rows: int) -> Exchanges:
    """Of two ranks and a step of `rows` tokens.

    A step begins with rank 0's command and ends with logits. Tensor parallelism: two sums a layer, in the last layer of
    the rows of logits alone. A pipeline: the rows once.
    """
    hidden, layers, vocabulary = (config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    if stages == 2:
        return Exchanges(3, FLOAT_BYTES * (rows * hidden + logit_rows * vocabulary))
    sums = (2 * layers - 2) * rows + 2 * logit_rows
    return Exchanges(2 * layers + 2, FLOAT_BYTES * (sums * hidden + logit_rows * vocabulary // 2))


def main() -> None:
    """Prints the median step of each row and link beside the model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    whole = build_engine(options.model, options.work_dir, 1, 1)
    cut = build_engine(options.model, options.work_dir, 2, options.stages)
    steps: dict[tuple[str, Link], list[float]] = {}
    for _ in range(options.repeats):
        for link in LINKS:
            for row, tokens_per_second in _sample(cut, whole, link, options.work_dir).items():
                if row in ROWS:
                    steps.setdefault((row, link), []).append(ROWS[row] / tokens_per_second)
    config = json.loads((options.model / "config.json").read_text())
    for row, tokens in ROWS.items():
        base = statistics.median(steps[row, FASTEST])
        for link in LINKS:
            measured = statistics.median(steps[row, link])
            expected = base + exchanges(config, options.stages, tokens, 1 if tokens == PROMPT else tokens).seconds(link)
            print(f"{row:22} {link.name:20} {1e3 * measured:8.1f} ms, by the model {1e3 * expected:8.1f}: "
                  f"{measured / expected:.0%}")  # fmt: skip


def _sample(engine: Path, whole: Path, link: Link, work_dir: Path) -> dict[str, float]:
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [
        "ip", "netns", "exec", NAMESPACES[0], mpirun, "-launcher", "ssh", "-launcher-exec", launcher(work_dir),
        "-localhost", ADDRESSES[0], "-hosts", ",".join(ADDRESSES), "-n", "2",
        sys.executable, SAMPLE, engine, whole, "1",
    ]  # fmt: skip
    with two_hosts(link):
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False,
            env={**os.environ, "FI_PROVIDER": "tcp"},
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
