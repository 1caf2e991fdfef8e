"""Puts the problems of an adapter into one message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_LAYER_OR_EXPERT: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_LISTED: Final = 20


def join_problems(problems: Iterable[str]) -> str:
    """Joins problems with semicolons.

    Problems that differ only in the number of a layer or an expert are listed once, with their count. After 20 problems
    only the number of the others is given.
    """
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_LAYER_OR_EXPERT.sub("N", problem), []).append(problem)
    listed = [_with_count(first, len(others)) for first, *others in alike.values()]
    if (hidden := len(listed) - _MAX_LISTED) > 0:
        listed = [*listed[:_MAX_LISTED], f"problems that are not listed: {hidden}"]
    return "; ".join(listed)


def _with_count(problem: str, others: int) -> str:
    if others == 0:
        return problem
    kinds = ("layer or expert", "layers or experts") if "expert" in problem else ("layer", "layers")
    return f"{problem} (and for {others} other {kinds[others > 1]})"
