"""Flags of commands that build a model's engine on first use; named as in `adaptrt build`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from ...common.byte_size import weight_memory
from ...formats.engine.build_config import AUTO, SPARSE_MLP
from ..model_cache.options import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_LORA_RANK,
    DEFAULT_MAX_NUM_TOKENS,
    DEFAULT_MAX_SEQ_LEN,
    EngineOptions,
)
from .dtype_flag import add_dtype, dtype_of
from .quantization_flags import add_quantization, quantization_of
from .quantization_report import INT8_KV_CACHE_HELP

MODEL_HELP: Final = "engine, checkpoint or Hugging Face model directory; a model's engine is built on first use"

_SIZES: Final = {
    "max_batch_size": f"maximum sequences in a step (default: {DEFAULT_MAX_BATCH_SIZE})",
    "max_num_tokens": f"maximum tokens in a step, prompts and answers together (default: {DEFAULT_MAX_NUM_TOKENS})",
    "max_seq_len": f"maximum tokens of a prompt and its answer (default: {DEFAULT_MAX_SEQ_LEN}, or the model's maximum "
    "if that is less)",
    "max_input_len": "maximum tokens of a prompt (default: max_seq_len)",
    "max_beam_width": "maximum beams of a request (default: 1)",
    "max_lora_rank": f"maximum rank of adapters (default: {DEFAULT_MAX_LORA_RANK})",
    "max_extra_tokens": "maximum tokens that an adapter may add to the model's vocabulary (default: 0)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags. engine_for() rejects them if the path is already an engine directory."""
    group = parser.add_argument_group("engines built on first use")
    add_dtype(group)
    for name, text in _SIZES.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument(
        "--long_lora_scaling_factors", type=int, nargs="+", metavar="N",
        help="factors by which adapters may divide rotary positions (default: none)",
    )  # fmt: skip
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
        "file when they are used (default: the engine's own setting; 0: all weights are mapped)",
    )  # fmt: skip


def engine_options_of(args: argparse.Namespace) -> EngineOptions:
    """The options that the flags ask for. Raises ConfigError for flags that exclude each other."""
    factors = args.long_lora_scaling_factors
    return EngineOptions(
        **{name: getattr(args, name) for name in _SIZES},
        long_lora_scaling_factors=None if factors is None else tuple(factors),
        dtype=dtype_of(args),
        quantization=quantization_of(args),
        int8_activations=args.int8_activations,
        int8_kv_cache=args.int8_kv_cache,
        compress_weights=args.compress_weights,
        sparse_mlp=args.sparse_mlp,
    )
