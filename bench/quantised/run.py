"""Compares all weight formats of engines: bytes, speed and perplexity.

    python bench/quantised/run.py WORK_DIR [--model DIR [--text FILE]] [--published DIR ...] [--formats NAME ...]
        [--repeats 3] [--tokens 4096] [--output FILE]

Builds an engine of each format in WORK_DIR (existing ones are kept) and measures them in turn, with their weights in
the process's memory: decoding of one request, a prompt of 512 tokens, and the share of the machine's read bandwidth
that a decode step uses. It also measures each format's quality, because speeds of formats with different quality are
not comparable: perplexity, and the divergence from the bfloat16 engine in nats per token.

Without --model, speeds are those of a model with 491 million random weights, and perplexities those of the trained demo
model on its training documents. With --model both are of that model, and --text is required. Weights are rounded
without calibration. --published adds models that a library quantised, in any format that AdaptRT reads, with the sizes
of --model. AdaptRT reads the formats marked *, but does not produce them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from quantised.rounded import rounded

from adaptrt._core import DType, QuantAlgo, WeightCode
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.common.byte_size import ALL_WEIGHTS
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.runtime.adapter_tokenizers import load_tokenizer
from adaptrt.runtime.text_quality import Quality, measure, read_tokens
from adaptrt.tools.bench.executors import CpuUse, load_native_engine
from adaptrt.tools.bench.limits import peak_of, roofline_shares
from adaptrt.tools.bench.profile import Work
from adaptrt.tools.bench.runner import Bench
from adaptrt.tools.bench.scenario_types import NO_ADAPTERS, Decode, Prefill, RunSettings
from adaptrt.tools.demo_corpus import STYLES, document, facts
from scenarios.model import BenchModel, write_model

DEMO_MODEL: Final = Path(__file__).parents[2] / "examples" / "demo" / "model"
PROMPT, CONTEXT, GENERATED, WINDOW = 512, 128, 32, 512


def _of_four_bits(code: WeightCode, group_size: int, scales: DType) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16, group_size=group_size, scale_dtype=scales, code=code, value_dtype=DType.BFLOAT16
    )


def _of_eight_bits(code: WeightCode, group_size: int | None) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W8A16,
        group_size=group_size,
        scale_dtype=DType.FLOAT32,
        code=code,
        value_dtype=DType.BFLOAT16,
    )


def _as_gptq(bits: int, group_size: int, *, reordered: bool = False) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16, group_size=group_size, scale_dtype=DType.FLOAT16, bits=bits, reordered=reordered
    )


FORMATS: Final[dict[str, QuantConfig | None]] = {
    "bfloat16": None,
    "W8A16": QuantConfig(quant_algo=QuantAlgo.W8A16),
    "W8A8": QuantConfig(quant_algo=QuantAlgo.W8A8),
    "LLM.int8() *": _of_eight_bits(WeightCode.LLM_INT8, None),
    "FP8, groups of 128 *": _of_eight_bits(WeightCode.E4M3, 128),
    "8 bits, zero points, 128 *": QuantConfig(
        quant_algo=QuantAlgo.W8A16, group_size=128, has_zero_point=True, scale_dtype=DType.FLOAT16
    ),
    "W4A16, groups of 128": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=128),
    "W4A8, groups of 128": QuantConfig(quant_algo=QuantAlgo.W4A8, group_size=128),
    "4 bits, act-order, 128 *": _as_gptq(4, 128, reordered=True),
    "NF4, blocks of 64 *": _of_four_bits(WeightCode.NF4, 64, DType.FLOAT32),
    "MXFP4 *": _of_four_bits(WeightCode.E2M1, 32, DType.BFLOAT16),
    "3 bits, groups of 128 *": _as_gptq(3, 128),
    "3 bits, int8 activations, 128 *": _as_gptq(3, 128).with_int8_activations(),
    "2 bits, groups of 64 *": _as_gptq(2, 64),
    "2 bits, int8 activations, 64 *": _as_gptq(2, 64).with_int8_activations(),
}


@dataclass(frozen=True)
class Speed:
    """Speed of an engine on this machine."""

    megabytes_per_token: float
    decode: float
    """Tokens per second of one request."""
    bandwidth_share: float
    """Share of the machine's read bandwidth that decode steps use."""
    prefill: float
    """Prompt tokens per second."""


def engines_of(model: Path, formats: Sequence[str], published: Sequence[Path], place: Path) -> dict[str, Path]:
    """An engine of each format; missing ones are built."""
    engines = {}
    sources: dict[str, tuple[Path, QuantConfig | None]] = {name: (model, FORMATS[name]) for name in formats}
    sources |= {directory.name: (directory, None) for directory in published}
    for name, (source, how) in sources.items():
        engines[name] = place / "".join(letter if letter.isalnum() else "_" for letter in name)
        if (engines[name] / "config.json").is_file():
            continue
        began = time.monotonic()
        checkpoint = Checkpoint.of_model(source, DType.BFLOAT16)
        sizes = {"max_num_tokens": 1024, "max_seq_len": min(1024, checkpoint.config.max_position_embeddings)}
        config = BuildConfig(max_batch_size=1, **sizes)
        build(checkpoint if how is None else rounded(checkpoint, how), config, engines[name])
        print(f"built {name}, {source.name}, in {time.monotonic() - began:.0f} s", flush=True)
    return engines


def speeds_of(engines: Mapping[str, Path], repeats: int, threads: int) -> Iterator[tuple[str, Speed]]:
    """Yields (name, speed). The engines are measured in turn."""
    loaded = {name: load_native_engine(engine, ALL_WEIGHTS) for name, engine in engines.items()}
    scenarios: list[Prefill | Decode] = []
    for name in engines:
        scenarios += [
            Prefill(
                name=f"{name}/prefill", title=f"{name}, prefill", engine=name, adapters=NO_ADAPTERS, unit="tok/s",
                input_length=PROMPT,
            ),
            Decode(
                name=f"{name}/decode", title=f"{name}, decode", engine=name, adapters=NO_ADAPTERS, unit="tok/s",
                requests=1, input_length=CONTEXT, output_length=GENERATED,
            ),
        ]  # fmt: skip
    settings = RunSettings(repeats=repeats, quiet_share=0.06, extra_samples=0, quiet_wait=0.0)
    subject = next(iter(engines.values())).parent
    report = Bench(subject, scenarios, settings, loaded, CpuUse(threads, ""), print).run()
    rows = {row.name: row for row in report.rows}
    for name, engine in loaded.items():
        decode = rows[f"{name}/decode"]
        assert decode.work_bytes is not None
        peak = peak_of(engine.program, {limit: figure.median for limit, figure in report.limits.items()})
        # Only reads count here.
        bandwidth, work = report.limits["read_bandwidth"], Work(decode.work_bytes, 0)
        shares = roofline_shares(decode.figure, work, 1, bandwidth, report.limits[peak], peak)
        yield (
            name,
            Speed(
                megabytes_per_token=decode.work_bytes / 1e6,
                decode=decode.figure.median,
                bandwidth_share=shares.median,
                prefill=rows[f"{name}/prefill"].figure.median,
            ),
        )


def qualities_over_text(engines: Mapping[str, Path], model: Path, text: Path, tokens: int) -> dict[str, Quality]:
    """Quality of each engine on a text."""
    ids = read_tokens(text, model / "tokenizer.json", tokens)
    window = min(WINDOW, Checkpoint.of_model(model).config.max_position_embeddings - 1)
    return dict(zip(engines, measure(list(engines.values()), ids, window), strict=True))


def qualities_over_demo(engines: Mapping[str, Path], tokens: int) -> dict[str, Quality]:
    """Quality of each engine of the demo model on its training documents, each document separately."""
    tokenizer = load_tokenizer(DEMO_MODEL / "tokenizer.json")
    documents = [document(fact, style, tagged=style != "plain") for style in STYLES for fact in facts()]
    random.Random(0).shuffle(documents)
    of_length: dict[int, list[int]] = defaultdict(list)
    for text in documents:
        ids = tokenizer.encode(text).ids
        if tokens > 0:
            of_length[len(ids)] += ids
        tokens -= len(ids)
    whole = {name: Quality() for name in engines}
    for length, ids in of_length.items():
        for quality, measured in zip(whole.values(), measure(list(engines.values()), ids, length), strict=True):
            quality.tokens += measured.tokens
            quality.negative_log_likelihood += measured.negative_log_likelihood
            quality.divergence += measured.divergence
            quality.same_choices += measured.same_choices
    return whole


def print_table(speeds: Mapping[str, Speed], qualities: Mapping[str, Quality]) -> None:
    """Prints one row per format, without missing values."""
    names = list(dict.fromkeys([*speeds, *qualities]))
    width = max(map(len, names))
    print(
        f"\n{'':{width}}  {'MB/token':>8} {'decode':>8} {'of read':>8} {'prefill':>8}  {'perplexity':>10} {'nats':>8}"
    )
    print(f"{'':{width}}  {'':8} {'tok/s':>8} {'bandw.':>8} {'tok/s':>8}  {'':10} {'apart':>8}")
    for name in names:
        speed, quality = speeds.get(name), qualities.get(name)
        row = f"{name:{width}}  " + 35 * " "
        if speed is not None:
            row = (
                f"{name:{width}}  {speed.megabytes_per_token:8.1f} {speed.decode:8.1f} {speed.bandwidth_share:8.1%} "
                f"{speed.prefill:8.0f}"
            )
        if quality is not None:
            row += f"  {quality.perplexity:10.4f} {quality.divergence / quality.tokens:8.5f}"
        print(row)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--published", type=Path, nargs="+", default=[])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="maximum tokens of the text")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args(arguments)
    if (args.model is None) != (args.text is None):
        parser.error("expected both --model and --text, or neither")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        model = args.work_dir / "0.5b"
        if not (model / "config.json").is_file():
            shutil.rmtree(model, ignore_errors=True)
            write_model(BenchModel(), model)
        engines = engines_of(model, args.formats, args.published, args.work_dir / "engines")
        taught = engines_of(DEMO_MODEL, args.formats, [], args.work_dir / "demo")
        qualities = qualities_over_demo(taught, args.tokens)
    else:
        engines = engines_of(args.model, args.formats, args.published, args.work_dir / "engines")
        qualities = qualities_over_text(engines, args.model, args.text, args.tokens)
    speeds = dict(speeds_of(engines, args.repeats, args.threads))
    print_table(speeds, qualities)
    if args.output is not None:
        made = {
            "speed": {name: vars(speed) for name, speed in speeds.items()},
            "perplexity": {name: quality.perplexity for name, quality in qualities.items()},
        }
        args.output.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
