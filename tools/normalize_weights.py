"""Normalises a DoRA adapter's magnitudes by its base model: m / ||W + s B A|| for each output channel."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..formats.adapter import normalize_adapter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags, which are TensorRT-LLM's."""
    parser.add_argument("-i", "--in-dir", type=Path, required=True, help="PEFT adapter directory with DoRA")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, help="directory for the normalised adapter")
    parser.add_argument("-b", "--base-model", type=Path, required=True, help="Hugging Face directory of the base model")
    parser.add_argument("--strip", action="store_true", help="remove the magnitudes instead, which leaves plain LoRA")


def run(args: argparse.Namespace) -> int:
    """Normalises one adapter, or removes its magnitudes."""
    adapter = normalize_adapter(args.in_dir, args.out_dir, args.base_model, strip=args.strip)
    done = "removed" if args.strip else "normalised"
    print(f"{args.out_dir}: magnitudes of {len(adapter.modules)} modules {done}")
    return 0


if __name__ == "__main__":
    from ..builder.cli import run_command

    sys.exit(
        run_command(
            sys.modules[__name__],
            sys.argv[1:],
            prog="python -m adaptrt.tools.normalize_weights",
            description=__doc__,
        )
    )
