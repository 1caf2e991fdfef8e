"""Measures the perplexity of one trained model in every weight format of AdaptRT, llama.cpp and OpenVINO.

    python bench/quantised/perplexity.py TRAINED --home HOME [--tokens 16384] [--no_repack] [--threads N]
        [--output FILE]

TRAINED is the directory that trained.py wrote, HOME the one given to bench/peers/install.sh. Engines and the peers'
files are created in TRAINED; existing ones are kept. All see the same windows of 512 tokens of the held-out text,
without a begin-of-text token. Each token but the first of a window is predicted from the earlier tokens of the window.
The first row is the model in float32, run by transformers. Divergences are from its distributions, in nats per token.

No weights are calibrated. llama.cpp's files are measured twice: with the embedding, which is also lm_head, in bfloat16,
so that only the layers differ; and as llama-quantize makes them by default. In AdaptRT's formats without *, lm_head is
int8; in the others it is bfloat16. In OpenVINO, lm_head and the embedding are int8.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from models import export_for
from quantised.likelihood import REFERENCE, WINDOWS, Likelihood, log_probabilities
from quantised.peers import LLAMA_CPP, OPENVINO
from quantised.run import FORMATS, engines_of

from adaptrt._core import DType, dtype_name
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.text_quality import read_tokens, run_windows

WINDOW = 512
LLAMA_CPP_PLAIN = "BF16"
KEEP_EMBEDDING = ["--token-embedding-type", "bf16", "--output-tensor-type", "bf16"]


@dataclass(frozen=True)
class Found:
    """Result of one format."""

    perplexity: float
    divergence: float
    bits: float
    """Bits per weight of the layers, including its share of scales and zero points."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--no_repack", action="store_true", help="llama.cpp's weights as they are in the file, where its AMX code fails"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    base = options.trained / "base"
    ids = read_tokens(options.trained / "held_out.txt", base / "tokenizer.json", options.tokens)
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids) - 1, WINDOW)]
    (options.trained / WINDOWS).write_text(json.dumps(windows))
    results: dict[str, Found] = {}
    print(f"{f'{len(windows)} windows':36} {'bits':>6} {'perplexity':>10} {'nats apart':>10}")
    for name, found in found_in(options, base, windows):
        results[name] = found
        print(f"{name:36} {found.bits:6.2f} {found.perplexity:10.4f} {found.divergence:10.5f}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({name: vars(found) for name, found in results.items()}, indent=2) + "\n")
    return 0


def found_in(options: argparse.Namespace, base: Path, windows: list[list[int]]) -> Iterator[tuple[str, Found]]:
    """Yields (name, result) of every format."""
    reference = write_reference(options.trained, base, windows)
    yield "transformers, float32", reference
    yield from of_engines(options.trained, base, windows)
    export_for("llama_cpp", options.trained, options.home, {"bf16"})
    for kind in (LLAMA_CPP_PLAIN, *LLAMA_CPP):
        yield f"llama.cpp {kind}", of_llama_cpp(options, kind, KEEP_EMBEDDING)
        if kind != LLAMA_CPP_PLAIN:
            yield f"llama.cpp {kind}, embedding as well", of_llama_cpp(options, kind, [])
    export_for("openvino", options.trained, options.home, {"bf16", *OPENVINO})
    for kind in ("", *(f"-{kind}" for kind in OPENVINO)):
        yield f"OpenVINO {kind[1:] or 'f16'}", _of_script(options, "openvino", options.trained / f"openvino{kind}")


def write_reference(folder: Path, base: Path, windows: list[list[int]]) -> Found:
    """Result of the original weights in float32."""
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = sum(len(ids) - 1 for ids in windows)
    shape = (rows, model.config.vocab_size)
    reference = np.lib.format.open_memmap(folder / REFERENCE, "w+", np.float32, shape)
    likelihood = Likelihood(reference)
    row = 0
    for ids in windows:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].numpy()
        reference[row : row + len(logits)] = log_probabilities(logits)
        likelihood.add(ids, logits)
        row += len(logits)
    reference.flush()
    return Found(**likelihood.result(), bits=16.0)


def of_engines(folder: Path, base: Path, windows: list[list[int]]) -> Iterator[tuple[str, Found]]:
    """Results of AdaptRT's formats."""
    engines = engines_of(base, list(FORMATS), [], folder / "engines")
    reference = np.load(folder / REFERENCE, mmap_mode="r")
    found = [Likelihood(reference) for _ in engines]
    ids = [token for window in windows for token in window]
    for window, logits in run_windows([load_engine(engine) for engine in engines.values()], ids, WINDOW):
        for likelihood, values in zip(found, logits, strict=True):
            likelihood.add(window, values)
    for name, likelihood in zip(engines, found, strict=True):
        yield name, Found(**likelihood.result(), bits=bits_of(FORMATS[name], base))


def bits_of(how: QuantConfig | None, base: Path) -> float:
    """Bits per weight of the layers in an engine of this format."""
    if how is None:
        return 16.0
    with safetensors.safe_open(base / "model.safetensors", "numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if name.endswith("proj.weight")]  # noqa: SIM118
    value = how.bits if how.has_few_bits else 8
    scale = 8 * np.dtype(dtype_name(how.scale_dtype if how.has_typed_scales else DType.FLOAT32)).itemsize
    zero = value if how.has_zero_point else 0
    groups = sum(outputs * (inputs // (how.group_size or inputs)) for outputs, inputs in shapes)
    return value + (scale + zero) * groups / sum(outputs * inputs for outputs, inputs in shapes)


def of_llama_cpp(options: argparse.Namespace, kind: str, flags: Sequence[str]) -> Found:
    """Result of a file that llama-quantize makes with these flags."""
    folder = options.trained / "gguf"
    model = folder / "base.gguf"
    if kind != LLAMA_CPP_PLAIN:
        model = folder / f"{kind.lower()}{'-layers' if flags else ''}.gguf"
        if not model.exists():
            tool = options.home / "llama-build" / "bin" / "llama-quantize"
            subprocess.run([tool, *flags, folder / "base.gguf", model, kind], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)  # fmt: skip
    return _of_script(options, "llama_cpp", options.home, model, repack=not options.no_repack)


def _of_script(options: argparse.Namespace, peer: str, *arguments: object, repack: bool | None = None) -> Found:
    command = [
        options.home / f"venv-{peer}" / "bin" / "python", Path(__file__).with_name(f"{peer}_likelihood.py"),
        *arguments, options.trained, options.threads, *([] if repack is None else [int(repack)]),
    ]  # fmt: skip
    made = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    return Found(**json.loads(made.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
