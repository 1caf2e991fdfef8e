"""`adaptrt convert-checkpoint`: a Hugging Face model directory becomes a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..._core import DType, dtype_from_name, dtype_name
from ..checkpoint.convert import convert_checkpoint
from ..progress import format_bytes, progress_on

_AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags; their names are TensorRT-LLM's."""
    parser.add_argument(
        "--model_dir", type=Path, required=True, metavar="DIR", help="directory of the Hugging Face model"
    )
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--dtype",
        default=_AUTO,
        choices=[_AUTO, *(dtype_name(dtype) for dtype in DType)],
        help="type of the weights; auto: the one that the model's config.json states (default: %(default)s)",
    )
    parser.add_argument(
        "--tp_size",
        type=int,
        default=1,
        metavar="N",
        help="cut each layer for N ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--pp_size",
        type=int,
        default=1,
        metavar="N",
        help="cut the stack of layers into N (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="ranks written at a time (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Converts and says what was written."""
    converted = convert_checkpoint(
        args.model_dir,
        args.output_dir,
        dtype=None if args.dtype == _AUTO else dtype_from_name(args.dtype),
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        workers=args.workers,
        progress=progress_on(),
    )
    config = converted.config
    ranks = config.mapping.world_size
    print(
        f"{args.output_dir}: {config.architecture}, {config.num_hidden_layers} layers, "
        f"{dtype_name(config.dtype)}, {converted.num_tensors} tensors of {format_bytes(converted.num_bytes)} "
        f"in {ranks} rank{'s' if ranks > 1 else ''}"
    )
    return 0
