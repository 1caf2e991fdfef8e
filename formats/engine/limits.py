"""Limits of an engine: numbers that a user chooses when the engine is built.

A limit is a field of BuildConfig or LoraBuildConfig that limit() declares. Flags, config.json, checks and the options
of engines that are built on first use follow from that declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

_KEY: Final = "limit"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Subject and accepted values of one limit, a field of a build config."""

    text: str
    """Thing that the limit counts; the help of its flag begins with it."""
    minimum: int = 1
    maximum: int | None = None
    """None: another limit of the config bounds it."""
    default: Any
    """Value if the user chooses none."""
    unset: str = ""
    """Meaning of the default None."""
    is_list: bool = False
    """True: it has several values, in ascending order, each from minimum to maximum."""
    is_omitted: bool = False
    """True: config.json omits it at its default. Engines from before it existed stay the same."""

    def accepts(self, value: int) -> bool:
        """True if the value lies from minimum to maximum."""
        return self.minimum <= value and (self.maximum is None or value <= self.maximum)


def limit(text: str, *, default: Any, **settings: Any) -> Any:
    """Declares a field of a dataclass; the arguments are Limit's."""
    declared = Limit(text=text, default=default, **settings)
    return field(default=default, metadata={_KEY: declared})


def limits_of(config_class: type[Any]) -> dict[str, Limit]:
    """Returns the limits of a dataclass by the names of their fields, in the order of declaration."""
    return {item.name: item.metadata[_KEY] for item in fields(config_class) if _KEY in item.metadata}


def chosen_limits(limits: Mapping[str, Limit], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the limits that `values` chooses. It leaves out None, which stands for the default."""
    found = {name: (declared, values.get(name)) for name, declared in limits.items()}
    return {
        name: tuple(sorted(value)) if declared.is_list else value
        for name, (declared, value) in found.items()
        if value is not None
    }
