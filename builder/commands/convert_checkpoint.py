"""`adaptrt convert-checkpoint`: a Hugging Face model directory becomes a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from ..._core import ConfigError, QuantAlgo, dtype_name
from ..checkpoint.quantization import DEFAULT_GROUP_SIZE, GROUP_SIZES, QuantConfig
from ..conversion.convert import convert_checkpoint
from ..progress import format_bytes, progress_on
from .dtype_flag import add_dtype, dtype_of
from .quantization_report import INT8_KV_CACHE_HELP, error_table

_INT8: Final = "int8"
_INT4: Final = "int4"
_UNSUPPORTED_PRECISIONS: Final = ("int8_gptq", "int4_gptq", "int4_awq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags; their names are TensorRT-LLM's."""
    parser.add_argument(
        "--model_dir", type=Path, required=True, metavar="DIR", help="directory of the Hugging Face model"
    )
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="directory to write")
    add_dtype(parser)
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
    group = parser.add_argument_group("quantised weights")
    group.add_argument(
        "--use_weight_only", action="store_true", help="round the weights of linear layers, with one scale an output"
    )
    group.add_argument(
        "--weight_only_precision",
        choices=[_INT8, _INT4, *_UNSUPPORTED_PRECISIONS],
        help="int8, or int4; gptq and awq need weights that were calibrated, and are refused (default: int8)",
    )
    group.add_argument("--per_group", action="store_true", help="int4 only: one scale for each group of inputs")
    group.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help=f"inputs of a group: {', '.join(map(str, GROUP_SIZES))} (default: {DEFAULT_GROUP_SIZE})",
    )
    group.add_argument("--has_zero_point", action="store_true", help="int4 only: a zero point beside each scale")
    group.add_argument("--int8_kv_cache", action="store_true", help=INT8_KV_CACHE_HELP)


def quantization_of(args: argparse.Namespace) -> QuantConfig | None:
    """The quantisation that the flags ask for. Raises ConfigError for flags that do not go together."""
    problems = []
    precision = args.weight_only_precision or _INT8
    if precision in _UNSUPPORTED_PRECISIONS:
        problems.append(
            f"weight_only_precision {precision}: weights of calibrated quantisers cannot be read yet; accepted: "
            f"{_INT8}, {_INT4}"
        )
    needs = {
        "weight_only_precision": (args.weight_only_precision is not None, args.use_weight_only, "use_weight_only"),
        "per_group": (args.per_group, args.use_weight_only, "use_weight_only"),
        "group_size": (args.group_size is not None, args.per_group, "per_group"),
        "has_zero_point": (args.has_zero_point, args.use_weight_only, "use_weight_only"),
    }
    problems += [
        f"{name} needs {other}" for name, (given, fulfilled, other) in needs.items() if given and not fulfilled
    ]
    for name in ("per_group", "has_zero_point"):
        if getattr(args, name) and precision == _INT8:
            problems.append(f"{name} needs weight_only_precision {_INT4}")
    if problems:
        raise ConfigError("; ".join(problems))
    if not args.use_weight_only:
        return None
    group_size = args.group_size if args.group_size is not None else DEFAULT_GROUP_SIZE
    config = QuantConfig(
        quant_algo=QuantAlgo.W8A16 if precision == _INT8 else QuantAlgo.W4A16,
        group_size=group_size if args.per_group else None,
        has_zero_point=args.has_zero_point,
    )
    if problems := config.problems():
        raise ConfigError("; ".join(problems))
    return config


def run(args: argparse.Namespace) -> int:
    """Converts and says what was written."""
    quantization = quantization_of(args)
    converted = convert_checkpoint(
        args.model_dir,
        args.output_dir,
        dtype=dtype_of(args),
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        workers=args.workers,
        quantization=quantization,
        int8_kv_cache=args.int8_kv_cache,
        progress=progress_on(),
    )
    config = converted.config
    ranks = config.mapping.world_size
    print(
        f"{args.output_dir}: {config.architecture}, {config.describe_depth()}, "
        f"{dtype_name(config.dtype)}, {converted.num_tensors} tensors of {format_bytes(converted.num_bytes)} "
        f"in {ranks} rank{'s' if ranks > 1 else ''}{', int8 KV cache' if config.int8_kv_cache else ''}"
    )
    if converted.num_vision_tensors:
        print(f"left aside: {converted.num_vision_tensors} tensors of the vision tower; the engine is for text alone")
    if converted.quantization_errors:
        Console().print(error_table(converted.quantization_errors))
    return 0
