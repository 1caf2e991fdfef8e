"""The flag of `adaptrt convert-checkpoint` and `adaptrt build` for the type of a Hugging Face model's weights."""

from __future__ import annotations

import argparse

from ..._core import DType, dtype_from_name, dtype_name
from ..config import AUTO


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Declares it."""
    parser.add_argument(
        "--dtype", default=AUTO, choices=[AUTO, *(dtype_name(dtype) for dtype in DType)],
        help="type of the weights; auto: the one that the model's config.json states (default: %(default)s)",
    )  # fmt: skip


def dtype_of(args: argparse.Namespace) -> DType | None:
    """The type that is asked for; None: the model's own."""
    return None if args.dtype == AUTO else dtype_from_name(args.dtype)
