"""Python functions that change logits before a token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from .checked_fields import BOOL, CheckedFields, Kind, optional

Processor = Callable[..., Any]


def _callable(value: Any) -> Processor:
    if not callable(value):
        raise TypeError
    return value  # type: ignore[no-any-return]


def _processors(value: Any) -> dict[str, Processor | None]:
    if not isinstance(value, Mapping):
        raise TypeError
    for name, processor in value.items():
        if not isinstance(name, str) or (processor is not None and not callable(processor)):
            raise TypeError
    return dict(value)


_PROCESSOR: Final = Kind("callable", _callable)


@dataclass(eq=False)
class LogitsPostProcessorConfig(CheckedFields):
    """ExecutorConfig.logits_post_processor_config, which executors refuse."""

    processor_map: Annotated[
        dict[str, Processor | None] | None, optional(Kind("dict of names to callables", _processors))
    ] = None
    processor_batched: Annotated[Processor | None, optional(_PROCESSOR)] = None
    replicate: Annotated[bool, BOOL] = True
