"""Converts an adapter of PEFT or MLX-LM to TensorRT-LLM's model.lora_weights.npy and model.lora_config.npy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .._core import AdapterError
from ..formats.adapter import MAGNITUDE, SHIFT, ConvertedAdapter, convert_adapter
from ..formats.adapter.adapter import MAGNITUDES_NORMALIZED
from ..formats.sources import find_adapter, find_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; the first four are TensorRT-LLM's."""
    parser.add_argument("-i", "--in-file", required=True, help="adapter: a directory or a name of the Hub")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, help="directory for the two .npy files")
    parser.add_argument(
        "--storage-type",
        choices=("float32", "float16", "bfloat16"),
        default="float16",
        help="type of the written weights; engines of any type read it (default: float16)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="list the rows")
    parser.add_argument(
        "--base_model",
        help="base model, a directory or a name of the Hub: used to check shapes, to normalise DoRA magnitudes, and to "
        "convert trained biases to differences from the base model's",
    )
    parser.add_argument(
        "--initial_adapter",
        type=Path,
        help="the adapter before its training, if its initialisation changed the base model (PiSSA, CorDA, LoRA-GA, "
        "...)",
    )
    parser.add_argument(
        "--dora_magnitudes",
        choices=(MAGNITUDES_NORMALIZED,),
        help="state that the magnitudes are normalised, if the file does not say so",
    )


def run(args: argparse.Namespace) -> int:
    """Converts one adapter."""
    adapter = convert_adapter(
        find_adapter(args.in_file).directory,
        storage_dtype=args.storage_type,
        base=None if args.base_model is None else find_model(args.base_model).directory,
        initial_adapter=args.initial_adapter,
        magnitudes_normalized=args.dora_magnitudes == MAGNITUDES_NORMALIZED,
    )
    if adapter.invocation_tokens:
        raise AdapterError(
            f"{args.in_file}: is an aLoRA adapter, and TensorRT-LLM's tensors cannot store its invocation "
            f"tokens {list(adapter.invocation_tokens)}; serve it from its directory"
        )
    adapter.save(args.out_dir)
    if args.verbose:
        _print_rows(adapter)
    rows, width = adapter.weights.shape[1:]
    print(f"{args.out_dir}: {rows} rows of {width} {args.storage_type} values")
    return 0


def _print_rows(adapter: ConvertedAdapter) -> None:
    print("module  layer  rank  dora  bias  from")
    for (module_id, layer, rank, vectors), path in zip(adapter.config[0].tolist(), adapter.paths, strict=True):
        dora, bias = ("yes" if vectors & flag else "no" for flag in (MAGNITUDE, SHIFT))
        print(f"{module_id:>6}  {layer:>5}  {rank:>4}  {dora:>4}  {bias:>4}  {path}")


if __name__ == "__main__":
    from ..builder.cli import run_command

    sys.exit(
        run_command(
            sys.modules[__name__],
            sys.argv[1:],
            prog="python -m adaptrt.tools.hf_lora_convert",
            description=__doc__,
        )
    )
