"""Flags for the limits that an engine is built with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.number_flags import whole_number
from ...formats.engine.limits import Limit


def add_limits(
    group: Any,
    limits: Mapping[str, Limit],
    *,
    defaults: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Declares a flag for each limit, in a parser or a group of one. A flag that is not given is None.

    defaults: texts of defaults that differ from those of the limits, by name.
    aliases: second names of flags.
    """
    for name, limit in limits.items():
        default = (defaults or {}).get(name) or _default(limit)
        names = [name, *([aliases[name]] if aliases is not None and name in aliases else [])]
        group.add_argument(
            *(f"--{each}" for each in names),
            type=whole_number,
            nargs="+" if limit.is_list else None,
            dest=name,
            metavar="N",
            help=limit.text + (f" (default: {default})" if default else ""),
        )


def _default(limit: Limit) -> str:
    return limit.unset if limit.default is None or limit.is_list else str(limit.default)
