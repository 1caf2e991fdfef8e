"""Accepted values of the fields that control sampling, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Final, NamedTuple

from ..common.shown_value import shown

INT32_MAX: Final = (1 << 31) - 1
"""Maximum of token ids and of numbers of tokens."""
MAX_LOG_PROBS: Final = 20
"""Maximum number of most likely tokens per position; a limit of the executor."""
MAX_LOGIT_BIAS: Final = 100.0
LOGIT_BIASES: Final = f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
"""Accepted numbers of logit_bias, as errors show them."""


class Accepted(NamedTuple):
    """Values that a field accepts."""

    accepts: Callable[[Any], bool]
    values: str
    """The accepted values, for errors."""


def _number(accepts: Callable[[float], bool], values: str) -> Accepted:
    def is_accepted(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and accepts(value)

    return Accepted(is_accepted, values)


def _integer(minimum: int, maximum: int, values: str) -> Accepted:
    def is_accepted(value: Any) -> bool:
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        return is_integer and minimum <= int(value) <= maximum

    return Accepted(is_accepted, values)


TOKEN_ID: Final = _integer(0, INT32_MAX, f"a token id, 0 to {INT32_MAX}")
BOOLEAN: Final = Accepted(lambda value: isinstance(value, bool), "True or False")

SAMPLING_FIELDS: Final[Mapping[str, Accepted]] = {
    "max_tokens": _integer(1, INT32_MAX, "1 or more"),
    "min_tokens": _integer(0, INT32_MAX, "0 or more"),
    "n": _integer(1, INT32_MAX, "1 or more"),
    "temperature": _number(lambda value: value >= 0, "0 or more"),
    "top_p": _number(lambda value: 0 < value <= 1, "more than 0, at most 1"),
    "top_k": _integer(-1, INT32_MAX, "1 or more, or -1 or 0 for no limit"),
    "min_p": _number(lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": _number(lambda value: value > 0, "more than 0"),
    "presence_penalty": _number(lambda value: -2 <= value <= 2, "-2 to 2"),
    "frequency_penalty": _number(lambda value: -2 <= value <= 2, "-2 to 2"),
    "seed": _integer(-(1 << 63), (1 << 64) - 1, "an integer of 64 bits"),
    "logprobs": _integer(0, MAX_LOG_PROBS, f"0 to {MAX_LOG_PROBS}"),
    "prompt_logprobs": _integer(0, MAX_LOG_PROBS, f"0 to {MAX_LOG_PROBS}"),
}


def unaccepted(name: str, value: Any, accepted: Accepted) -> str | None:
    """Returns the error for a field's value; None: the value is accepted."""
    return None if accepted.accepts(value) else f"{name} is {shown(value)}; expected {accepted.values}"
