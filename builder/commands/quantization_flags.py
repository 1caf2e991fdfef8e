"""Weight quantisation flags of `adaptrt build` and of the commands that build on first use."""

from __future__ import annotations

import argparse
from typing import Any

from ..._core import ConfigError, QuantAlgo
from ...formats.checkpoint.quantization import DEFAULT_GROUP_SIZE, FEW_BITS, GROUP_SIZES, QUANT_ALGOS, QuantConfig


def add_quantization(group: Any) -> None:
    """Declares the flags in an argument group."""
    group.add_argument(
        "--quantization", choices=[name.lower() for name in QUANT_ALGOS],
        help="quantise the weights of linear layers to int8 (w8a16) or to four bits (w4a16); w8a8 and w4a8 also "
        "round each token's activations to int8; lm_head and vision towers become int8 (w8a16) in all of them",
    )  # fmt: skip
    group.add_argument(
        "--group_size", type=int, metavar="N",
        help=f"w4a16, w4a8: number of inputs that share a scale: {', '.join(map(str, GROUP_SIZES))}, or 0 for one "
        f"scale per output (default: {DEFAULT_GROUP_SIZE})",
    )  # fmt: skip
    group.add_argument("--has_zero_point", action="store_true", help="w4a16, w4a8: store a zero point with each scale")
    group.add_argument(
        "--int8_activations", action="store_true",
        help="multiply integer weights, published or quantised here, with activations rounded to int8, one scale "
        "per token",
    )  # fmt: skip
    add_dequantize(group)


def add_dequantize(group: Any) -> None:
    """Declares the flag for pre-quantised models."""
    group.add_argument(
        "--dequantize", action="store_true",
        help="store pre-quantised layers (GGUF, GPTQ, ...) in the engine's type: larger, but with "
        "many requests or long prompts faster on CPUs without AVX-512",
    )  # fmt: skip


def quantization_of(args: argparse.Namespace) -> QuantConfig | None:
    """The quantisation that the flags ask for. Raises ConfigError for flags that exclude each other."""
    if args.quantization is None:
        given = [name for name in ("group_size", "has_zero_point") if getattr(args, name) not in (None, False)]
        if given:
            raise ConfigError(
                f"{' and '.join(given)}: without quantization this has no effect; expected --quantization as well"
            )
        return None
    algo = QuantAlgo[args.quantization.upper()]
    group_size = args.group_size
    if group_size is None and algo in FEW_BITS:
        group_size = DEFAULT_GROUP_SIZE
    config = QuantConfig(quant_algo=algo, group_size=group_size or None, has_zero_point=args.has_zero_point)
    problems = config.problems()
    if not problems and not config.can_be_made:
        reasons = {
            "group_size is given, but {} always has one scale per output": config.group_size is not None,
            "has_zero_point is given, but {} is always symmetric": config.has_zero_point,
        }
        problems = [reason.format(algo.name) for reason, applies in reasons.items() if applies]
    if algo in FEW_BITS and args.group_size not in (None, 0, *GROUP_SIZES):
        problems = [f"{problem}; or 0 for one scale per output" for problem in problems]
    if problems:
        raise ConfigError(f"quantization {args.quantization}: " + "; ".join(problems))
    return config
