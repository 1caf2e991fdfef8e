"""The flag of commands that take a Hugging Face model for the type of its weights."""

from __future__ import annotations

import argparse
from typing import Any

from ..._core import DType, dtype_from_name, dtype_name
from ...formats.engine.build_config import AUTO


def add_dtype(parser: Any) -> None:
    """Declares it, in a parser or a group of one."""
    parser.add_argument(
        "--dtype", default=AUTO, choices=[AUTO, *(dtype_name(dtype) for dtype in DType)],
        help="type of a Hugging Face model's weights; auto: the one that its config.json states (default: %(default)s)",
    )  # fmt: skip


def dtype_of(args: argparse.Namespace) -> DType | None:
    """The type that is asked for; None: the model's own."""
    return None if args.dtype == AUTO else dtype_from_name(args.dtype)
