"""Flags of commands that build a model's engine on first use; named as in `adaptrt build`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from ...common.byte_size import weight_memory
from ...common.number_flags import MAX_INT32, integer
from ...formats.engine.build_config import AUTO, NATIVE, SPARSE_MLP
from ...formats.engine.limits import chosen_limits
from ..model_cache.options import SERVING_BACKENDS, SERVING_DEFAULTS, SERVING_LIMITS, VLLM_LIMITS, EngineOptions
from .dtype_flag import add_dtype, dtype_of
from .limit_flags import add_limits
from .quantization_flags import add_quantization, quantization_of
from .quantization_report import INT8_KV_CACHE_HELP

MODEL_HELP: Final = (
    "directory of an engine, a checkpoint or a Hugging Face model, or a model's name in the Hub (ORGANISATION/NAME); a "
    "model's engine is built on first use"
)

_DEFAULTS: Final = {
    **{name: str(default) for name, default in SERVING_DEFAULTS.items()},
    "max_seq_len": f"{SERVING_DEFAULTS['max_seq_len']}, or the model's maximum if that is less",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags. engine_for() rejects them if the path is already an engine directory."""
    group = parser.add_argument_group("engines built on first use")
    add_dtype(group)
    group.add_argument(
        "--backend", default=NATIVE, choices=SERVING_BACKENDS,
        help="native runs on the CPU, cuda on an NVIDIA GPU (default: %(default)s)",
    )  # fmt: skip
    add_limits(group, SERVING_LIMITS, defaults=_DEFAULTS, aliases=VLLM_LIMITS)
    add_quantization(group)
    group.add_argument("--int8_kv_cache", action="store_true", help=INT8_KV_CACHE_HELP)
    group.add_argument(
        "--compress_weights", action="store_true", help="store bfloat16 weights losslessly in 12 bits each"
    )
    group.add_argument(
        "--sparse_mlp", default=AUTO, choices=SPARSE_MLP,
        help="ReLU-gated layers: read only the active neurons' weights (default: %(default)s)",
    )  # fmt: skip


def add_weight_memory(group: Any) -> None:
    """Declares the flag for ExecutorConfig.weight_memory."""
    group.add_argument(
        "--weight_memory", type=weight_memory, metavar="SIZE",
        help="maximum memory for weights, such as 4GiB or all; weights that do not fit are read from the engine "
        "file when they are used, or, for a GPU, copied there from host memory (default: the engine's own setting; "
        "0: all weights are mapped, or on the GPU)",
    )  # fmt: skip


def add_device_ids(group: Any) -> None:
    """Declares the flag for ParallelConfig.device_ids."""
    group.add_argument(
        "--device_ids", type=integer(0, MAX_INT32), nargs=1, metavar="GPU",
        help="number of the GPU that runs an engine of backend cuda or tensorrt, in the order of CUDA, from 0 on "
        "(default: the first one)",
    )  # fmt: skip


def engine_options_of(args: argparse.Namespace) -> EngineOptions:
    """The options that the flags ask for. Raises ConfigError for flags that exclude each other."""
    return EngineOptions(
        **chosen_limits(SERVING_LIMITS, vars(args)),
        dtype=dtype_of(args),
        quantization=quantization_of(args),
        int8_activations=args.int8_activations,
        dequantize=args.dequantize,
        int8_kv_cache=args.int8_kv_cache,
        compress_weights=args.compress_weights,
        sparse_mlp=args.sparse_mlp,
        backend=args.backend,
    )
