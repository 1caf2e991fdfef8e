"""Keeps exceptions of plugins that TensorRT calls: TensorRT only prints them and returns an error code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Problems = list[str]
"""Errors in plugins, oldest first."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def reported(method: _Method) -> _Method:
    """Decorates a method so that its exceptions are added to `self.problems` before TensorRT gets them."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.problems.append(str(error) or repr(error))
            raise

    return cast(_Method, call)
