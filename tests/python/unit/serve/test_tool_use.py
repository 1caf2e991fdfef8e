"""A function whose parameters no guide can enforce is refused by its name."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import GuidedDecodingParams, RequestError
from adaptrt.serve.errors import ApiError
from adaptrt.serve.tool_guides import GuidedFunction
from adaptrt.serve.tool_use import _check

WHOLE = GuidedDecodingParams(GuidedDecodingParams.GuideType.EBNF_GRAMMAR, "whole")


class Compiler:
    """Refuses the guide of the whole answer, and schemas with these titles."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.num_guides = 0

    async def compile_guide(self, guide: GuidedDecodingParams) -> None:
        self.num_guides += 1
        title = guide.guide if guide.guide == "whole" else json.loads(guide.guide or "").get("title")
        if title in self.refused:
            raise RequestError(f"no {title}")


def check(compiler: Compiler) -> None:
    service: Any = SimpleNamespace(executor=compiler)
    functions = [
        GuidedFunction(name, {"type": "object", "title": name}, True, f"tools[{i}].function")
        for i, name in enumerate(("first", "second", "third"))
    ]
    asyncio.run(_check(service, WHOLE, functions, is_forced=False))


def test_a_guide_that_can_be_enforced_is_compiled_once() -> None:
    compiler = Compiler("second")
    check(compiler)
    assert compiler.num_guides == 1


def test_the_first_function_that_cannot_be_enforced_is_named() -> None:
    with pytest.raises(ApiError) as raised:
        check(Compiler("whole", "second", "third"))
    assert str(raised.value) == "tools[1].function.parameters of 'second' cannot be enforced: no second"
    assert (raised.value.status, raised.value.param) == (400, "tools[1].function.parameters")


def test_functions_that_only_together_cannot_be_enforced_have_the_guides_error() -> None:
    compiler = Compiler("whole")
    with pytest.raises(RequestError, match=r"^no whole$"):
        check(compiler)
    assert compiler.num_guides == 4
