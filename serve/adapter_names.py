"""Names that clients may give to adapters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ..formats.sources.sum_of_names import parse_sum

LONGEST_NAME: Final = 256


def is_name(name: str) -> bool:
    """True if a model or an adapter can have this name."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


def name_problem(name: str, model_names: Collection[str]) -> str | None:
    """Returns why no adapter can have this name; None if one can. `model_names`: names of the base model.

    Raises AdapterError for a weighted sum of too many terms.
    """
    if not is_name(name):
        return f"has {len(name)} characters; accepted: 1 to {LONGEST_NAME} that can be printed"
    if parse_sum(name) is not None:
        return f"is '{name}', which is a weighted sum; expected another name"
    if name in model_names:
        return f"is '{name}', which is the base model's name; expected another name"
    return None
