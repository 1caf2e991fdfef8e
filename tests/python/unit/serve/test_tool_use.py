"""Which chats get a guide for their calls, and errors for parameters that no guide can enforce."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import GuidedDecodingParams, RequestError
from adaptrt.runtime.chat_template import ChatTemplate
from adaptrt.serve.errors import ApiError
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.tool_guides import GuidedFunction
from adaptrt.serve.tool_use import _check, _form_of, tool_use_of

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


JSON = {"response_format": {"type": "json_object"}}
REGEX = {"structured_outputs": {"regex": "a+"}}


@pytest.mark.parametrize(
    ("fields", "strict", "guide"),
    [
        ({}, False, None),
        ({}, True, "calls"),
        ({"parallel_tool_calls": False}, False, "calls"),
        ({"tool_choice": "required"}, False, "calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False, "calls"),
        (JSON, False, "calls"),
        (JSON, True, "calls"),
        (REGEX, False, "a+"),
        (REGEX, True, ApiError),
        ({**REGEX, "tool_choice": "required"}, False, ApiError),
        ({"tool_choice": "none"}, True, "no tools"),
    ],
)
def test_an_answer_has_a_guide_if_its_calls_or_its_text_are_restricted(
    fields: dict[str, Any], strict: bool, guide: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": {"type": "object"}}}
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": [tool], **fields})

    async def tokenizer_of(adapter: str | None) -> Any:
        return SimpleNamespace(vocabulary=SimpleNamespace(special_id=lambda text: None))

    async def template_for(fields: ChatRequest, adapter: str | None) -> Any:
        return ChatTemplate({"default": "<tool_call>"}, {}, "t")

    service: Any = SimpleNamespace(
        options=SimpleNamespace(tool_call_parser="auto"),
        tokenizers=SimpleNamespace(of=tokenizer_of),
        prompts=SimpleNamespace(template_for=template_for),
    )
    service.executor = SimpleNamespace(compile_guide=lambda _: asyncio.sleep(0))
    if guide is ApiError:
        with pytest.raises(ApiError, match="given with a guide that is not JSON"):
            asyncio.run(tool_use_of(service, chat, None))
        return
    use = asyncio.run(tool_use_of(service, chat, None))
    if use is None:
        assert guide == "no tools"
    elif use.guide is None:
        assert guide is None
    elif use.guide.guide_type == GuidedDecodingParams.GuideType.REGEX:
        assert use.guide.guide == guide
    else:
        assert (guide, use.guide.guide_type) == ("calls", GuidedDecodingParams.GuideType.EBNF_GRAMMAR)


TEMPLATES = {
    "the model's": ("auto", {"default": "<tool_call>"}, "hermes"),
    "the one for tools": ("auto", {"default": "<tool_call>", "tool_use": "<|python_tag|>"}, "llama3_json"),
    "a flag's": ("hermes", {"default": "<|python_tag|>"}, "hermes"),
    "an alias": ("llama4_json", None, "llama3_json"),
    "a variant of a flag's": ("mistral", {"default": "[TOOL_CALLS]f[ARGS]"}, "mistral_named"),
    "no template": ("auto", None, None),
    "no marker": ("auto", {"default": "{{ tools }}"}, None),
}


@pytest.mark.parametrize(("flag", "templates", "form"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_template_that_writes_tools_shows_the_form(
    flag: str, templates: dict[str, str] | None, form: str | None
) -> None:
    asked: Any = SimpleNamespace()

    async def template_for(fields: ChatRequest, adapter: str | None) -> Any:
        assert (fields, adapter) == (asked, "a")
        return None if templates is None else ChatTemplate(templates, {}, "t")

    service: Any = SimpleNamespace(
        options=SimpleNamespace(tool_call_parser=flag), prompts=SimpleNamespace(template_for=template_for)
    )
    assert asyncio.run(_form_of(service, asked, "a")) == form
