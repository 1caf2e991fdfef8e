"""`adaptrt convert-checkpoint`: converts a Hugging Face model directory to a checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from ..._core import ConfigError, DType, QuantAlgo, dtype_name
from ...common.number_flags import MAX_INT32, integer
from ...common.progress import format_bytes, progress_on
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.quantization import DEFAULT_GROUP_SIZE, GROUP_SIZES, QuantConfig
from ...formats.hugging_face.hf_config import HfConfig, published_format
from ...formats.hugging_face.published.awq import Awq
from ...formats.hugging_face.published.gptq import Gptq
from ...formats.sources import find_model
from ..conversion.convert import convert_checkpoint
from .dtype_flag import add_dtype, dtype_of
from .quantization_flags import add_dequantize
from .quantization_report import INT8_KV_CACHE_HELP, error_table

_INT8: Final = "int8"
_INT4: Final = "int4"
_PUBLISHED: Final = ("int8_gptq", "int4_gptq", "int4_awq")
"""Methods of models that were published quantised. The flags must agree with the model's config.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags; their names are TensorRT-LLM's."""
    parser.add_argument(
        "--model_dir", required=True, metavar="MODEL", help="Hugging Face model: a directory or a name of the Hub"
    )
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="directory to write")
    add_dtype(parser)
    parser.add_argument(
        "--tp_size",
        type=int,
        default=1,
        metavar="N",
        help="tensor parallelism: split each layer over N ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--pp_size",
        type=int,
        default=1,
        metavar="N",
        help="pipeline parallelism: split the layers into N stages (default: %(default)s)",
    )
    parser.add_argument(
        "--moe_tp_size",
        type=int,
        metavar="N",
        help="split each expert over N of the tp_size ranks (default: tp_size / moe_ep_size, or tp_size without "
        "moe_ep_size)",
    )
    parser.add_argument(
        "--moe_ep_size",
        type=int,
        metavar="N",
        help="distribute the experts of a layer over N of the tp_size ranks; moe_tp_size * moe_ep_size must equal "
        "tp_size (default: tp_size / moe_tp_size, or 1 without moe_tp_size)",
    )
    parser.add_argument(
        "--workers",
        type=integer(1, MAX_INT32),
        default=1,
        metavar="N",
        help="number of ranks' files written at a time (default: %(default)s)",
    )
    group = parser.add_argument_group("quantised weights")
    group.add_argument(
        "--use_weight_only",
        action="store_true",
        help="quantise the weights of linear layers, with one scale per output",
    )
    group.add_argument(
        "--weight_only_precision",
        choices=[_INT8, _INT4, *_PUBLISHED],
        help="int8 or int4; gptq and awq state the format in which the model was published (default: int8)",
    )
    group.add_argument(
        "--quant_ckpt_path",
        type=Path,
        metavar="DIR",
        help="gptq and awq: directory of the published model, which is converted instead of model_dir",
    )
    group.add_argument("--per_group", action="store_true", help="int4 only: one scale for each group of inputs")
    group.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help=f"number of inputs in a group: {', '.join(map(str, GROUP_SIZES))} (default: {DEFAULT_GROUP_SIZE})",
    )
    group.add_argument("--has_zero_point", action="store_true", help="int4 only: store a zero point with each scale")
    add_dequantize(group)
    group.add_argument("--int8_kv_cache", action="store_true", help=INT8_KV_CACHE_HELP)


def quantization_of(args: argparse.Namespace) -> QuantConfig | None:
    """The quantisation that the flags ask for. Raises ConfigError for flags that exclude each other."""
    problems = []
    precision = args.weight_only_precision or _INT8
    is_published = precision in _PUBLISHED
    if args.quant_ckpt_path is not None and not is_published:
        problems.append(f"quant_ckpt_path needs weight_only_precision {' or '.join(_PUBLISHED)}")
    needs = {
        "weight_only_precision": (args.weight_only_precision is not None, args.use_weight_only, "use_weight_only"),
        "per_group": (args.per_group, args.use_weight_only, "use_weight_only"),
        "group_size": (args.group_size is not None, args.per_group, "per_group"),
        "has_zero_point": (args.has_zero_point, args.use_weight_only, "use_weight_only"),
    }
    problems += [
        f"{name} needs {other}" for name, (given, fulfilled, other) in needs.items() if given and not fulfilled
    ]
    if args.per_group and precision == _INT8:
        problems.append(f"per_group needs weight_only_precision {_INT4}")
    if args.has_zero_point and precision != _INT4:
        problems.append(f"has_zero_point needs weight_only_precision {_INT4}")
    if problems:
        raise ConfigError("; ".join(problems))
    if not args.use_weight_only or is_published:
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


def model_of(args: argparse.Namespace) -> Path | ConfigFile:
    """The model's directory. For a model that was published quantised, its config.json, with which the flags agree.

    Raises ConfigError if the flags contradict that file.
    """
    directory: Path = args.quant_ckpt_path or find_model(args.model_dir).directory
    if args.weight_only_precision not in _PUBLISHED:
        return directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected the directory of the published model, with its config.json")
    file = ConfigFile.read(directory)
    found = published_format(file)
    if not isinstance(found, Gptq | Awq) or f"int{found.bits}_{found.method}" != args.weight_only_precision:
        what = "not quantised" if found is None else found.describe()
        raise ConfigError(f"{directory}: weight_only_precision {args.weight_only_precision}: the model is {what}")
    given = DEFAULT_GROUP_SIZE if args.group_size is None else args.group_size
    if args.per_group and given != found.group_size:
        raise ConfigError(f"{directory}: group_size {given}: the model is {found.describe()}")
    if args.quant_ckpt_path is not None:
        _check_same_model(find_model(args.model_dir).directory, file)
    return file


def _check_same_model(model_dir: Path, published: ConfigFile) -> None:
    own, other = (
        replace(HfConfig.read(model, dtype=DType.FLOAT32).config, quantization=None) for model in (model_dir, published)
    )
    differing = [field.name for field in fields(own) if getattr(own, field.name) != getattr(other, field.name, None)]
    if differing:
        raise ConfigError(
            f"{published.directory}: quant_ckpt_path is not the same model as model_dir {model_dir}: "
            f"{', '.join(differing)} differ"
        )


def run(args: argparse.Namespace) -> int:
    """Converts the model and prints a summary."""
    quantization = quantization_of(args)
    converted = convert_checkpoint(
        model_of(args),
        args.output_dir,
        dtype=dtype_of(args),
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        moe_tp_size=args.moe_tp_size,
        moe_ep_size=args.moe_ep_size,
        workers=args.workers,
        quantization=quantization,
        int8_kv_cache=args.int8_kv_cache,
        keeps_published=not args.dequantize,
        progress=progress_on(),
    )
    config = converted.config
    ranks = config.mapping.world_size
    print(
        f"{args.output_dir}: {config.architecture}, {config.describe_depth()}, "
        f"{dtype_name(config.dtype)}, {converted.num_tensors} tensors of {format_bytes(converted.num_bytes)} "
        f"in {ranks} rank{'s' if ranks > 1 else ''}{', int8 KV cache' if config.int8_kv_cache else ''}"
    )
    for left in converted.left_out.describe():
        print(f"ignored: {left}")
    if converted.kept is not None:
        print(f"kept: {converted.kept.describe()}")
    if converted.dequantization is not None:
        print(f"dequantised: {converted.dequantization.describe()}")
    if converted.quantization_errors:
        Console().print(error_table(converted.quantization_errors))
    return 0
