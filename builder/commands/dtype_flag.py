"""The --dtype flag of commands that read a Hugging Face model."""

from __future__ import annotations

import argparse
from typing import Any

from ..._core import DType, dtype_from_name, dtype_name
from ...formats.engine.build_config import AUTO, DTYPE_ALIASES


def add_dtype(parser: Any) -> None:
    """Declares the flag in a parser or an argument group."""
    parser.add_argument(
        "--dtype",
        default=AUTO,
        type=lambda name: DTYPE_ALIASES.get(name, name),
        choices=[AUTO, *(dtype_name(dtype) for dtype in DType)],
        help="type of a Hugging Face model's weights; auto: the type in its config.json (default: %(default)s)",
    )


def dtype_of(args: argparse.Namespace) -> DType | None:
    """The requested type; None: the model's own."""
    return None if args.dtype == AUTO else dtype_from_name(args.dtype)
