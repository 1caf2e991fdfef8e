"""argparse types for number flags. Each has a range, so that no value is too large for the code that receives it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from .shown_value import cut

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1
MAX_UINT64: Final = 2**64 - 1
MAX_SECONDS: Final = 1e9
"""Maximum duration of a flag, about 30 years: deadlines are 64-bit ns."""

_SUFFIXES: Final = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def integer(minimum: int, maximum: int = MAX_INT64) -> Callable[[str], int]:
    """A flag's type: an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # Also raised for thousands of digits.
            value = None
        if value is None or not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"it is {cut(text)}; expected an integer from {minimum} to {maximum}")
        return value

    return parse


def whole_number(text: str) -> int:
    """A flag's type: an integer without a range, or one with a suffix as in vLLM: 8k is 8000, and 8K is 8192."""
    digits, suffix = (text[:-1], text[-1]) if text[-1:] in _SUFFIXES else (text, "")
    try:
        return int(digits) * _SUFFIXES.get(suffix, 1)
    except ValueError:  # Also raised for thousands of digits.
        raise argparse.ArgumentTypeError(
            f"it is {cut(text)}; expected an integer, or one with the suffix {', '.join(_SUFFIXES)}"
        ) from None


def seconds(*, above_zero: bool = False) -> Callable[[str], float]:
    """A flag's type: seconds from 0 to MAX_SECONDS, or above 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= MAX_SECONDS or (above_zero and value == 0):
            accepted = (
                f"seconds {'above' if above_zero else 'from'} 0 {'up ' if above_zero else ''}to {MAX_SECONDS:.0f}"
            )
            raise argparse.ArgumentTypeError(f"it is {cut(text)}; expected {accepted}")
        return value

    return parse


def fraction(text: str) -> float:
    """A flag's type: a number above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"it is {cut(text)}; expected a number above 0 and up to 1")
    return value
