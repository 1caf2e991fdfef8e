"""Measures images with a model of Qwen2.5-VL-3B's widths and random weights, and its peers in turn.

    python bench/vision/run.py HOME [--rounds 2] [--peers transformers openvino vllm] [--output report.json]

HOME gets the model and AdaptRT's engine. Peers have virtual environments there (bench/peers/install.sh; openvino and
vllm also need torchvision). `--prepare` only makes what is missing. Each figure is the median of the rounds, in which
peers take turns, each in a process of its own.

Rows, in seconds: `encode`: one image of 1024 x 1024 pixels to the language model's rows; `prefill`: its prompt of some
1,370 tokens to the first token; `answer`: both. `images-8`: eight requests at once with an image of 448 x 448 each;
`images-8-adapters`: the same with eight adapters on the tower. Eight layers of the tower (one of them attends to the
whole image) and six of the language model are measured: the published model has 32 and 36.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from vision_model import RANK, write_images, write_tower_adapters, write_vision_model

HERE = Path(__file__).parent
OURS = "adaptrt"
PEERS = {
    OURS: ("adaptrt_worker.py", None, ()),
    "transformers": ("transformers_worker.py", None, ("float32",)),
    "transformers-bf16": ("transformers_worker.py", None, ("bfloat16",)),
    "openvino": ("openvino_worker.py", "venv-openvino", ()),
    "vllm": ("vllm_worker.py", "venv-vllm", ()),
}
"""Script, virtual environment in HOME (None: this one), and further arguments."""
SLOW = "transformers-bf16"
"""Only measured if it is named: CPUs without AVX-512 have no fast products in bfloat16."""
ROWS = ("encode", "prefill", "answer", "images-8", "images-8-adapters")
TARGET, ADAPTERS_TARGET = 1.2, 0.8
"""Targets: least ratio of the best peer's seconds to ours, and of the seconds without adapters to those with."""


def prepare(home: Path, peers: Sequence[str]) -> Path:
    """Makes the model, images, adapters and engines that are missing. Raises CalledProcessError."""
    root = home / "root"
    write_vision_model(root / "base")
    write_tower_adapters(root / "adapters")
    write_images(root / "images")
    if not (root / "adaptrt-bf16" / "config.json").exists():
        _run([sys.executable, "-m", "adaptrt.builder.cli", "build", "--model_dir", root / "base", "--dtype", "bfloat16",
              "--output_dir", root / "adaptrt-bf16", "--lora_plugin", "auto", "--max_lora_rank", RANK,
              "--max_batch_size", 8, "--max_num_tokens", 2048, "--max_seq_len", 2048])  # fmt: skip
    if "openvino" in peers and not (root / "openvino" / "openvino_language_model.xml").exists():
        _run([home / "venv-openvino" / "bin" / "optimum-cli", "export", "openvino", "--model", root / "base",
              "--task", "image-text-to-text", "--weight-format", "fp16", root / "openvino"])  # fmt: skip
    return root


def _run(command: Sequence[object]) -> None:
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def measure(home: Path, root: Path, peer: str, threads: int, patience: float) -> dict[str, float] | None:
    """Runs a peer's worker. Returns its seconds by row; None if it fails."""
    script, venv, arguments = PEERS[peer]
    python = sys.executable if venv is None else str(home / venv / "bin" / "python")
    command = [python, str(HERE / script), str(root), str(threads), *arguments]
    log = home / f"{peer}.log"
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=patience, check=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{peer}: {error}; see {log}", file=sys.stderr)
            return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table_of(seconds: dict[str, dict[str, float]]) -> Table:
    """Table of the seconds of each row and peer, and of the ratios of the best peer to AdaptRT."""
    table = Table(title="seconds (ratio: of the best peer to AdaptRT)")
    table.add_column("row")
    for peer in seconds:
        table.add_column(peer, justify="right")
    table.add_column("ratio", justify="right")
    for row in ROWS:
        ours = seconds.get(OURS, {}).get(row)
        theirs = [found[row] for peer, found in seconds.items() if peer != OURS and row in found]
        ratio = f"{min(theirs) / ours:.2f} (target {TARGET})" if ours and theirs else ""
        if row == "images-8-adapters" and ours:
            share = seconds[OURS]["images-8"] / ours
            ratio = f"{share:.2f} of the speed without (target {ADAPTERS_TARGET})"
        figures = (f"{found[row]:.2f}" if row in found else "" for found in seconds.values())
        table.add_row(row, *figures, ratio)
    return table


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=[peer for peer in PEERS if peer != SLOW])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--patience", type=float, default=150.0, metavar="SECONDS", help="limit of a peer's process")
    parser.add_argument("--prepare", action="store_true", help="only make the model and the engines")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    home = args.home.resolve()
    root = prepare(home, args.peers)
    if args.prepare:
        return
    samples: dict[str, dict[str, list[float]]] = {peer: defaultdict(list) for peer in args.peers}
    failed: set[str] = set()
    for number in range(args.rounds):
        for peer in args.peers if number % 2 == 0 else args.peers[::-1]:
            found = None if peer in failed else measure(home, root, peer, args.threads, args.patience)
            if found is None:
                failed.add(peer)
                continue
            print(f"round {number + 1}: {peer}: {json.dumps(found)}", flush=True)
            for row, value in found.items():
                samples[peer][row].append(value)
    medians = {
        peer: {row: statistics.median(values) for row, values in rows.items()} for peer, rows in samples.items() if rows
    }
    if args.output is not None:
        args.output.write_text(json.dumps({"medians": medians, "samples": samples}, indent=2))
    Console(width=120).print(table_of(medians))


if __name__ == "__main__":
    main()
