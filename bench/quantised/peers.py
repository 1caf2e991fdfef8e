"""Measures OpenVINO's and llama.cpp's formats closest to those of run.py, with the same model of random weights.

    python bench/quantised/peers.py WORK_DIR --home HOME [--llama_cpp Q8_0 Q4_K_M ...] [--openvino int8 int4]
        [--repeats 3] [--threads N] [--output FILE]

HOME is the directory given to bench/peers/install.sh. The model is the one that run.py made in WORK_DIR, converted by
each peer's own tools; existing files are kept. Times are those that the peers report for a request: a prompt of 512
tokens, and decoding after one of 128. perplexity.py measures the quality of the formats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from llama_server import Times, llama_server
from models import export_for, write_tokenizer

from scenarios.model import BenchModel

PROMPT, CONTEXT, GENERATED = 512, 128, 32
LLAMA_CPP = ("Q8_0", "Q6_K", "Q4_0", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
OPENVINO = ("int8", "int4")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--llama_cpp", nargs="*", default=list(LLAMA_CPP), help="as llama-quantize names them")
    parser.add_argument(
        "--no_repack", action="store_true", help="llama.cpp's weights as they are in the file, where its AMX code fails"
    )
    parser.add_argument("--openvino", nargs="*", choices=OPENVINO, default=list(OPENVINO))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    root = prepared(options.work_dir)
    found: dict[str, tuple[float, float]] = {}
    print(f"{'':20} {'decode':>8} {'prefill':>8}, tok/s")
    for name in (
        *(f"llama.cpp {kind}" for kind in options.llama_cpp),
        *(f"OpenVINO {kind}" for kind in options.openvino),
    ):
        peer, kind = name.split()
        times = (of_llama_cpp if peer == "llama.cpp" else of_openvino)(options, root, kind)
        found[name] = (1 / times.token, PROMPT / times.prefill)
        print(f"{name:20} {found[name][0]:8.1f} {found[name][1]:8.0f}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def prepared(work_dir: Path) -> Path:
    """Directory of the peers' files."""
    root = work_dir / "peers"
    root.mkdir(exist_ok=True)
    if not (root / "base").exists():
        (root / "base").symlink_to((work_dir / "0.5b").resolve(), target_is_directory=True)
    if not (root / "base" / "tokenizer.json").exists():
        write_tokenizer(BenchModel(), root / "base")
    return root


def of_llama_cpp(options: argparse.Namespace, root: Path, kind: str) -> Times:
    """Medians for llama.cpp."""
    export_for("llama_cpp", root, options.home, {"bf16"})
    model = root / "gguf" / f"{kind.lower()}.gguf"
    if not model.exists():
        tool = options.home / "llama-build" / "bin" / "llama-quantize"
        subprocess.run([tool, root / "gguf" / "base.gguf", model, kind], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)  # fmt: skip
    random = np.random.default_rng(0)
    found = []
    flags = ("-ub", 512, *(["--no-repack"] if options.no_repack else []))
    with llama_server(options.home, model, threads=options.threads, context=PROMPT + 64, flags=flags) as server:
        server.measure(random.integers(100, 20000, CONTEXT).tolist(), 1)
        for _ in range(options.repeats):
            prefill = server.measure(random.integers(100, 20000, PROMPT).tolist(), 1).prefill
            token = server.measure(random.integers(100, 20000, CONTEXT).tolist(), GENERATED).token
            found.append(Times(prefill, token))
    return median_of(found)


def of_openvino(options: argparse.Namespace, root: Path, kind: str) -> Times:
    """Medians for OpenVINO, each sample from its own process."""
    export_for("openvino", root, options.home, {kind})
    script = Path(__file__).parents[1] / "long_context" / "openvino_context.py"
    python = options.home / "venv-openvino" / "bin" / "python"

    def measure(length: int, tokens: int) -> Times:
        made = subprocess.run(
            [python, script, root / f"openvino-{kind}", *map(str, (length, tokens, options.threads))],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return Times(*json.loads(made.stdout.splitlines()[-1]))

    return median_of(
        [Times(measure(PROMPT, 1).prefill, measure(CONTEXT, GENERATED).token) for _ in range(options.repeats)]
    )


def median_of(times: Sequence[Times]) -> Times:
    """Median of each of the two times."""
    return Times(statistics.median(t.prefill for t in times), statistics.median(t.token for t in times))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
