"""How long a request's KV blocks are worth keeping."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from ..._core import ConfigError
from .checked_fields import CheckedFields, Kind, instance_of, integer, list_of, optional


def _duration(value: Any) -> datetime.timedelta:
    if isinstance(value, bool):
        raise TypeError
    time = value if isinstance(value, datetime.timedelta) else datetime.timedelta(milliseconds=value)
    if time < datetime.timedelta(0):
        raise ValueError
    return time


_DURATION: Final = optional(Kind("timedelta, milliseconds", _duration))
_PRIORITY: Final = integer(0, 100)
DEFAULT_PRIORITY: Final = 35
"""TensorRT-LLM's, of blocks that no range says anything about."""


@dataclass(eq=False)
class TokenRangeRetentionConfig(CheckedFields):
    """Tokens [token_start, token_end) of a prompt, to its end with None, and the priority of their KV blocks."""

    token_start: Annotated[int, integer(0)]
    token_end: Annotated[int | None, optional(integer(1))]
    priority: Annotated[int, _PRIORITY]
    duration_ms: Annotated[datetime.timedelta | None, _DURATION] = None


_TokenRange = TokenRangeRetentionConfig  # whose name the class below has for itself


@dataclass(eq=False)
class KvCacheRetentionConfig(CheckedFields):
    """Request.kv_cache_retention_config, which executors refuse.

    Raises ConfigError for ranges that are empty or overlap.
    """

    token_range_retention_configs: Annotated[list[_TokenRange], list_of(instance_of(_TokenRange))]
    decode_retention_priority: Annotated[int, _PRIORITY] = DEFAULT_PRIORITY
    decode_duration_ms: Annotated[datetime.timedelta | None, _DURATION] = None

    TokenRangeRetentionConfig: ClassVar[type[_TokenRange]] = _TokenRange
    TokenRangeRetentionPriority: ClassVar[type[_TokenRange]] = _TokenRange

    def __post_init__(self) -> None:
        end: int | None = 0
        for index, tokens in enumerate(self.token_range_retention_configs):
            name = f"KvCacheRetentionConfig.token_range_retention_configs[{index}]"
            if end is None or tokens.token_start < end:
                raise ConfigError(f"{name} begins at token {tokens.token_start}, before the end of the range before it")
            end = tokens.token_end
            if end is not None and end <= tokens.token_start:
                raise ConfigError(f"{name} is [{tokens.token_start}, {end}), which is empty")

    @property
    def token_range_retention_priorities(self) -> list[_TokenRange]:
        """The older name of token_range_retention_configs."""
        return self.token_range_retention_configs
