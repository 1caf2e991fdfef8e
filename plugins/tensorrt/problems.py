"""Exceptions of plugins that TensorRT calls: it prints them and goes on with a return code, so they are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Problems = list[str]
"""What went wrong in plugins, oldest first."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def reported(method: _Method) -> _Method:
    """A method whose exceptions are noted in `self.problems` before TensorRT gets them."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.problems.append(str(error) or repr(error))
            raise

    return cast(_Method, call)
