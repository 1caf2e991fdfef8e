"""Measures OpenVINO and llama.cpp with run.py's context: prefill and decoding of one request.

    python bench/long_context/peers.py WORK_DIR --home HOME [--peers openvino llama_cpp] [--lengths 8192] [--tokens 16]
        [--longest 32768] [--behind 0 32256 130560 [--more 512]] [--threads N]

HOME is the directory given to bench/peers/install.sh. The model is the one that run.py made in WORK_DIR for its longest
length, converted by each peer's own tools; existing files are kept. Keys and values are int8 in OpenVINO and Q8_0 in
llama.cpp. Times are those that the peers report for a request.

--behind measures after a long context without computing it, as behind.py does for AdaptRT: the context repeats the keys
and values of 2048 tokens. For llama.cpp it restores a slot, and measures --more prompt tokens followed by generated
tokens. For OpenVINO it measures 2048 tokens and then one token, with the model that its pipeline runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from llama_cpp_state import SavedSlot
from llama_server import llama_server
from long_context.behind import measure as measure_behind
from models import export_for, write_tokenizer

from scenarios.model import BenchModel

BLOCK = 2048
CHUNK = 512
"""Number of prompt tokens that llama.cpp computes at a time."""
LLAMA_CPP = ("-b", BLOCK, "-ub", CHUNK, "-fa", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")


def main() -> None:
    """Prints a line for each peer and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--peers", choices=MEASURES, nargs="+", default=list(MEASURES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--longest", type=int, default=32768, help="the longest of run.py's lengths")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--behind", type=int, nargs="+", default=[])
    parser.add_argument("--more", type=int, default=CHUNK)
    options = parser.parse_args()
    for peer in options.peers:
        root = converted(options, peer)
        if options.behind:
            BEHIND[peer](options, root)
            continue
        for length in options.lengths:
            prefill, token = MEASURES[peer](options, root, length)
            print(
                f"{peer:>9}, {length:6} tokens: prefill {prefill:7.2f} s, {length / prefill:6.0f} tok/s; "
                f"decode {1 / token:6.2f} tok/s",
                flush=True,
            )


def converted(options: argparse.Namespace, peer: str) -> Path:
    """Directory of the peer's converted model."""
    longest = options.longest + options.tokens + 1
    root = options.work_dir / f"peers-{longest}"
    base, model = root / "base", options.work_dir / f"model-{longest}"
    if not model.is_dir():
        raise SystemExit(
            f"{model} is not there; run.py makes it, with --lengths {options.longest} and the same --tokens"
        )
    if not base.exists():
        root.mkdir(exist_ok=True)
        base.symlink_to(model.resolve(), target_is_directory=True)
    if not (base / "tokenizer.json").exists():
        write_tokenizer(BenchModel(), base)
    export_for(peer, root, options.home, {"bf16"})
    return root


def measure_openvino(options: argparse.Namespace, root: Path, length: int) -> tuple[float, float]:
    """Seconds of the prefill, and of a token after it."""
    script = Path(__file__).with_name("openvino_context.py")
    python = options.home / "venv-openvino" / "bin" / "python"
    found = subprocess.run(
        [python, script, root / "openvino", *map(str, (length, options.tokens, options.threads))],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    prefill, token = json.loads(found.stdout.splitlines()[-1])
    return prefill, token


def measure_llama_cpp(options: argparse.Namespace, root: Path, length: int) -> tuple[float, float]:
    """Seconds of the prefill, and of a token after it, as reported by a new server."""
    context = length + options.tokens + 64
    model = root / "gguf" / "base.gguf"
    with llama_server(options.home, model, threads=options.threads, context=context, flags=LLAMA_CPP) as server:
        times = server.measure(np.random.default_rng(length).integers(100, 20000, length).tolist(), options.tokens)
    return times.prefill, times.token


def openvino_behind(options: argparse.Namespace, root: Path) -> None:
    """Prints the times of further prompt tokens and of a generated token, after a context of each length."""
    script = Path(__file__).with_name("openvino_behind.py")
    python = options.home / "venv-openvino" / "bin" / "python"
    most = max(options.behind)
    command = [python, script, root / "openvino", *map(str, (most, BLOCK, options.threads))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def timed(tokens: int, behind: int) -> float:
            print(tokens, behind, file=asked, flush=True)
            return float(answers.readline())

        measure_behind("openvino", timed, options)


def llama_cpp_behind(options: argparse.Namespace, root: Path) -> None:
    """The same for llama.cpp, after restoring a slot."""
    model = root / "gguf" / "base.gguf"
    context = max(options.behind) + options.more + options.tokens + 64
    with tempfile.TemporaryDirectory() as folder:
        flags = (*LLAMA_CPP, "--slot-save-path", folder)
        with llama_server(options.home, model, threads=options.threads, context=context, flags=flags) as server:
            prompt = np.random.default_rng(0).integers(100, 20000, BLOCK + options.more)
            server.measure(prompt[:BLOCK].tolist(), 1)
            server.save_slot("short")
            short = SavedSlot.read((Path(folder) / "short").read_bytes())
            for length in options.behind:
                if length > 0:
                    (Path(folder) / "long").write_bytes(short.of_length(BLOCK, length))
                    server.restore_slot("long")
                before = np.resize(short.tokens[:BLOCK], length)
                times = server.measure(
                    [*before.tolist(), *prompt[BLOCK:].tolist()], options.tokens, computed=options.more
                )
                print(
                    f"llama_cpp, behind {length:6} tokens: {options.more} more {times.prefill:7.2f} s, "
                    f"{options.more / times.prefill:6.1f} tok/s; decode {1 / times.token:6.2f} tok/s",
                    flush=True,
                )


MEASURES = {"openvino": measure_openvino, "llama_cpp": measure_llama_cpp}
BEHIND = {"openvino": openvino_behind, "llama_cpp": llama_cpp_behind}

if __name__ == "__main__":
    main()
