"""Parses memory sizes written by people."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Final

from .._core import ConfigError

_UNITS: Final = {
    "": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
MOST_BYTES: Final = 1 << 62
ACCEPTED: Final = (
    "accepted: a number of bytes, or one with KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 4GiB, up to 2^62 bytes"
)


def parse_bytes(size: int | str, name: str) -> int:
    """Number of bytes of `4GiB`, `1.5 GB` or a number. Raises ConfigError that calls the value `name`."""
    if isinstance(size, int) and not isinstance(size, bool):
        if not 0 <= size <= MOST_BYTES:
            raise ConfigError(f"{name} is {size}; {ACCEPTED}")
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    # Very many digits give infinity, which cannot become an integer.
    num_bytes = float(match[1]) * _UNITS[match[2]] if match is not None and match[2] in _UNITS else -1.0
    if not 0 <= num_bytes <= MOST_BYTES:
        raise ConfigError(f"{name} is {size!r}; {ACCEPTED}")
    return int(num_bytes)


ALL_WEIGHTS: Final = MOST_BYTES
"""A weight_memory large enough for the weights of every engine."""


def parse_weight_memory(size: int | str, name: str) -> int:
    """Like parse_bytes, but also accepts `all`."""
    if size == "all":
        return ALL_WEIGHTS
    try:
        return parse_bytes(size, name)
    except ConfigError as error:
        raise ConfigError(f"{error}, or all") from None


def weight_memory(text: str) -> int:
    """parse_weight_memory as a flag's type."""
    return _of_flag(parse_weight_memory, text)


def byte_size(text: str) -> int:
    """parse_bytes as a flag's type."""
    return _of_flag(parse_bytes, text)


def _of_flag(parse: Callable[[str, str], int], text: str) -> int:
    try:
        return parse(text, "it")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
