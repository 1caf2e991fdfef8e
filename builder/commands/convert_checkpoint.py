"""`adaptrt convert-checkpoint`: a Hugging Face model directory becomes a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError, DType, dtype_from_name, dtype_name
from ..checkpoint.convert import convert_checkpoint
from ..progress import format_bytes, progress_on

_AUTO = "auto"

_NO_QUANTIZED_WEIGHTS: Final = "quantised weights are not available yet; accepted: leaving the flag out"
_UNAVAILABLE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "use_weight_only": ({"action": "store_true"}, _NO_QUANTIZED_WEIGHTS),
    "weight_only_precision": ({"metavar": "TYPE"}, _NO_QUANTIZED_WEIGHTS),
    "per_group": ({"action": "store_true"}, _NO_QUANTIZED_WEIGHTS),
    "group_size": ({"metavar": "N"}, _NO_QUANTIZED_WEIGHTS),
    "int8_kv_cache": (
        {"action": "store_true"},
        "a quantised KV cache is not available yet; accepted: leaving the flag out",
    ),
}
"""TensorRT-LLM's flags that are known and refused: how each is parsed, and the reason."""


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
    unavailable = parser.add_argument_group("not available yet: refused when given")
    for name, (parsing, reason) in _UNAVAILABLE.items():
        unavailable.add_argument(f"--{name}", help=reason.partition(";")[0], **parsing)


def run(args: argparse.Namespace) -> int:
    """Converts and says what was written."""
    refused = [f"{name}: {reason}" for name, (_, reason) in _UNAVAILABLE.items() if getattr(args, name)]
    if refused:
        raise ConfigError("; ".join(refused))
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
