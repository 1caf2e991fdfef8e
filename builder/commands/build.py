"""`adaptrt build`: builds an engine from a checkpoint or a Hugging Face model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..._core import ConfigError, DType, dtype_name
from ...common.byte_size import byte_size
from ...common.number_flags import MAX_INT32, integer
from ...common.progress import progress_on
from ...formats.engine.build_config import (
    AUTO,
    BACKENDS,
    CONSTANTS,
    DISABLE,
    ENABLE,
    LIMITS,
    LORA_LIMITS,
    NATIVE,
    SOLE_VALUES,
    SPARSE_MLP,
    TENSORRT,
    WEIGHTS,
    BuildConfig,
    LoraBuildConfig,
    PluginConfig,
    TensorRtBuildConfig,
)
from ...formats.engine.engine_quality import QualityMeasure
from ...formats.engine.limits import chosen_limits
from ...formats.engine.tensorrt.capability import CURRENT
from ...formats.engine.weight_usage import UsageMeasure
from ...formats.sources import find_adapter, find_model
from ..build import build
from ..conversion.checkpoint import Checkpoint
from .build_report import summary
from .dtype_flag import add_dtype, dtype_of
from .limit_flags import add_limits
from .quantization_flags import add_quantization, quantization_of
from .quantization_report import INT8_KV_CACHE_HELP, error_table, quality_table
from .trtllm_flags import PROMPT_TABLE, add_trtllm_flags

_PLUGIN_TYPES: Final = (AUTO, *(dtype_name(dtype) for dtype in DType), DISABLE)
DEFAULT_TEXT_TOKENS: Final = 4096
"""About a minute on two cores for a model of several billion weights."""
_SWITCH: Final = (ENABLE, DISABLE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags; their names and defaults are TensorRT-LLM's."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint_dir", type=Path, metavar="DIR", help="checkpoint to compile")
    source.add_argument(
        "--model_dir", metavar="MODEL",
        help="Hugging Face model to compile directly, without a checkpoint: a directory or a name of the Hub",
    )  # fmt: skip
    add_dtype(parser)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("engine_outputs"), metavar="DIR",
        help="directory to write (default: %(default)s)",
    )  # fmt: skip
    _add_sizes(parser.add_argument_group("sizes"))
    _add_lora(parser.add_argument_group("adapters"))
    _add_plugins(parser.add_argument_group("plugins and types"))
    output = parser.add_argument_group("compiler")
    output.add_argument(
        "--backend", default=NATIVE, choices=BACKENDS,
        help="native compiles for CPUs; cuda for NVIDIA GPUs, with AdaptRT's kernels; tensorrt for NVIDIA GPUs, with "
        "TensorRT (default: %(default)s)",
    )  # fmt: skip
    output.add_argument(
        "--workers", type=integer(1, MAX_INT32), default=1, metavar="N",
        help=f"number of {TENSORRT} plans, or of ranks' files, to write at a time (default: 1)",
    )  # fmt: skip
    output.add_argument(
        "--compress_weights", action="store_true",
        help="store bfloat16 weights losslessly in 12 bits each: same results with three quarters of the memory, "
        f"which makes small batches faster; needs backend {NATIVE}",
    )  # fmt: skip
    output.add_argument(
        "--weight_memory", type=byte_size, metavar="SIZE",
        help="maximum memory for weights, such as 4GiB, unless the executor sets another one; weights that do not "
        "fit are read from the engine file when they are used (ReLU-gated MLPs: only the active neurons), or, for a "
        "GPU, copied there from host memory (default: all weights are mapped, or on the GPU)",
    )  # fmt: skip
    output.add_argument(
        "--usage_text", type=Path, metavar="FILE",
        help="run the engine over a text, and store which neurons and experts it used; an engine with a "
        "weight_memory of any size keeps those in memory first",
    )  # fmt: skip
    output.add_argument(
        "--usage_tokens", type=integer(1), metavar="N",
        help=f"number of tokens to run, from the beginning of usage_text (default: {DEFAULT_TEXT_TOKENS})",
    )  # fmt: skip
    output.add_argument(
        "--sparse_mlp", default=AUTO, choices=SPARSE_MLP,
        help="ReLU-gated layers: read only the active neurons' weights; results do not change; auto enables it if "
        "weights are neither quantised nor compressed (default: %(default)s)",
    )  # fmt: skip
    output.add_argument(
        "--sparse_predictors", type=Path, metavar="DIR",
        help="directory of PowerInfer's predictors (model_0.pt, model_1.pt, ...), which predict the inactive "
        "neurons of a ReLU: faster for few requests, but results change; measure the change with --quality_text",
    )  # fmt: skip
    output.add_argument(
        "--dump_onnx", type=Path, metavar="FILE",
        help="also write the network as an ONNX file, with the weights in a second file",
    )  # fmt: skip
    _add_quantization(parser.add_argument_group("quantisation"))
    _add_tensorrt(parser.add_argument_group(f"backend {TENSORRT}"))
    add_trtllm_flags(
        parser.add_argument_group(
            "other flags of trtllm-build",
            "accepted with the value that describes what AdaptRT does anyway, otherwise refused for the reason below",
        )
    )


def _add_tensorrt(group: Any) -> None:
    group.add_argument(
        "--compute_capability", nargs="+", metavar="CC",
        help=f"GPUs to build for, with one plan each, for example 8.6; {CURRENT}: this machine's GPU (default: "
        f"{CURRENT})",
    )  # fmt: skip
    group.add_argument(
        "--weights", choices=WEIGHTS,
        help="constants: store the weights in each plan; external: once in a separate file for all plans (default: "
        "constants)",
    )  # fmt: skip
    group.add_argument(
        "--timing_cache", type=Path, metavar="FILE",
        help="TensorRT's cache of kernel timings, read and written; not for TensorRT for RTX",
    )  # fmt: skip


def _add_sizes(group: Any) -> None:
    add_limits(group, LIMITS, aliases={"max_seq_len": "max_decoder_seq_len"})
    _add_sole(group, "kv_cache_type", ("paged", "continuous", "disabled"))


def _add_lora(group: Any) -> None:
    group.add_argument(
        "--lora_plugin", default=DISABLE, choices=_PLUGIN_TYPES,
        help="enable adapters; auto selects the checkpoint's type (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dora_plugin", default=DISABLE, choices=_SWITCH, help="also enable DoRA adapters (default: %(default)s)"
    )
    add_limits(group, LORA_LIMITS)
    group.add_argument(
        "--fully_sharded_loras", action="store_true",
        help="with tensor parallelism, split both matrices of adapters over the ranks instead of one: about tp_size "
        "times as many adapters fit on each rank, at the cost of one more exchange per layer with adapters",
    )  # fmt: skip
    group.add_argument(
        "--lora_target_modules", nargs="+", default=[], metavar="MODULE",
        help="modules that adapters may change (default: those of the adapters in --lora_dir; without --lora_dir, all)",
    )  # fmt: skip
    group.add_argument(
        "--lora_dir", nargs="+", default=[], metavar="ADAPTER",
        help="PEFT adapters to copy into the engine: directories or names of the Hub; each is served under the last "
        "part of its name",
    )  # fmt: skip
    _add_sole(group, "lora_ckpt_source", ("hf", "nemo"))


def _add_plugins(group: Any) -> None:
    for name in ("gpt_attention_plugin", "gemm_plugin"):
        group.add_argument(
            f"--{name}",
            default=AUTO,
            choices=_PLUGIN_TYPES,
            help="auto or the checkpoint's type (default: %(default)s)",
        )
    for name in ("remove_input_padding", "context_fmha", "paged_kv_cache"):
        _add_sole(group, name, _SWITCH)
    _add_sole(group, "logits_dtype", tuple(dtype_name(dtype) for dtype in DType))


def _add_quantization(group: Any) -> None:
    add_quantization(group)
    group.add_argument("--int8_kv_cache", action="store_true", help=INT8_KV_CACHE_HELP)
    group.add_argument(
        "--quality_text", type=Path, metavar="FILE",
        help="run the engine, and a reference engine without the quantisation and predictors of this build, over a "
        "text; report and store both perplexities",
    )  # fmt: skip
    group.add_argument(
        "--quality_tokens", type=integer(1), metavar="N",
        help=f"number of tokens to read, from the beginning of quality_text (default: {DEFAULT_TEXT_TOKENS})",
    )  # fmt: skip


def _quality_of(args: argparse.Namespace) -> QualityMeasure | None:
    """Creates the quality measurement that the flags ask for. Raises ConfigError if the text cannot be read."""
    chosen = _text_of(args, "quality")
    if chosen is None:
        return None
    # Imported here because only builds that measure an engine run one.
    from ...runtime.text_quality import TextQuality

    return TextQuality(*chosen)


def _usage_of(args: argparse.Namespace) -> UsageMeasure | None:
    """Creates the usage measurement that the flags ask for. Raises ConfigError if the text cannot be read."""
    chosen = _text_of(args, "usage")
    if chosen is None:
        return None
    from ...runtime.text_usage import TextUsage

    return TextUsage(*chosen)


def _text_of(args: argparse.Namespace, purpose: str) -> tuple[Path, Path, int] | None:
    """Text of the flag `PURPOSE_text`, its tokenizer's directory, and number of tokens to read; None: no text."""
    text: Path | None = getattr(args, f"{purpose}_text")
    tokens: int | None = getattr(args, f"{purpose}_tokens")
    if text is None:
        if tokens is not None:
            raise ConfigError(f"{purpose}_tokens needs {purpose}_text")
        return None
    return (
        text,
        args.checkpoint_dir or find_model(args.model_dir).directory,
        DEFAULT_TEXT_TOKENS if tokens is None else tokens,
    )


def _source_of(args: argparse.Namespace) -> Checkpoint:
    """Opens the checkpoint or model that the flags name. Raises ConfigError for --dtype or --dequantize without a
    model."""
    if args.model_dir is not None:
        source = find_model(args.model_dir)
        opened = Checkpoint.of_dequantized_model if args.dequantize else Checkpoint.of_model
        return replace(opened(source.directory, dtype_of(args)), origin=source.record)
    if args.dtype != AUTO:
        raise ConfigError(f"dtype {args.dtype} needs model_dir: a checkpoint has the dtype that it was converted to")
    if args.dequantize:
        raise ConfigError("dequantize needs model_dir: a checkpoint has the weights that it was converted to")
    return Checkpoint.open(args.checkpoint_dir)


def _add_sole(group: Any, name: str, choices: tuple[str, ...]) -> None:
    group.add_argument(f"--{name}", default=SOLE_VALUES[name].value, choices=choices, help=_sole_help(name))


def _sole_help(name: str) -> str:
    return f"{SOLE_VALUES[name].value}: {SOLE_VALUES[name].reason}"


def config_of(args: argparse.Namespace) -> BuildConfig:
    """The config that the flags describe. Downloads adapters of the Hub."""
    adapters = [find_adapter(name) for name in args.lora_dir]
    has_names = any(adapter.origin is not None for adapter in adapters)
    return BuildConfig(
        **chosen_limits(LIMITS, vars(args)),
        kv_cache_type=args.kv_cache_type,
        logits_dtype=args.logits_dtype,
        backend=args.backend,
        compress_weights=args.compress_weights,
        weight_memory=args.weight_memory,
        sparse_mlp=args.sparse_mlp,
        sparse_predictors=args.sparse_predictors,
        lora_config=LoraBuildConfig(
            lora_dir=tuple(adapter.directory for adapter in adapters),
            adapter_names=tuple(adapter.last_part for adapter in adapters) if has_names else (),
            lora_ckpt_source=args.lora_ckpt_source,
            lora_target_modules=tuple(args.lora_target_modules),
            **chosen_limits(LORA_LIMITS, vars(args)),
            fully_sharded_loras=args.fully_sharded_loras,
        ),
        plugin_config=PluginConfig(
            gpt_attention_plugin=args.gpt_attention_plugin,
            gemm_plugin=args.gemm_plugin,
            lora_plugin=args.lora_plugin,
            dora_plugin=args.dora_plugin,
            remove_input_padding=args.remove_input_padding,
            context_fmha=args.context_fmha,
            paged_kv_cache=args.paged_kv_cache,
        ),
        tensorrt_config=_tensorrt_config_of(args),
    )


def _tensorrt_config_of(args: argparse.Namespace) -> TensorRtBuildConfig | None:
    """The TensorRT options; None if no flag sets them. BuildConfig checks if they are allowed."""
    if args.compute_capability is None and args.weights is None:
        return None
    return TensorRtBuildConfig(
        compute_capability=tuple(args.compute_capability or (CURRENT,)), weights=args.weights or CONSTANTS
    )


def run(args: argparse.Namespace) -> int:
    """Builds the engine and prints a summary."""
    prompt_rows = getattr(args, PROMPT_TABLE)
    if prompt_rows > 0 and args.backend != NATIVE:
        raise ConfigError(
            f"{PROMPT_TABLE} is {prompt_rows}; expected 0 with backend {args.backend}, or backend {NATIVE}"
        )
    if args.model_dir is not None:
        args.model_dir = find_model(args.model_dir)
    quantization, quality = quantization_of(args), _quality_of(args)
    report = build(
        _source_of(args),
        config_of(args),
        args.output_dir,
        quantization=quantization,
        int8_activations=args.int8_activations,
        int8_kv_cache=args.int8_kv_cache,
        quality=quality,
        usage=_usage_of(args),
        workers=args.workers,
        timing_cache=args.timing_cache,
        dump_onnx_to=args.dump_onnx,
        progress=progress_on(),
    )
    Console().print(summary(report))
    if report.quantization_errors:
        Console().print(error_table(report.quantization_errors))
    if report.quality is not None:
        measured = report.checkpoint.describe_types()
        if report.config.sparse_predictors is not None:
            measured += ", predicted"
        Console().print(quality_table(report.quality, measured))
    return 0
