"""Guides for the calls of chats, and errors for parameters that no guide can enforce."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import GuidedDecodingParams, RequestError
from adaptrt.runtime.chat_template import ChatTemplate
from adaptrt.serve.answer_form import answer_form_of
from adaptrt.serve.answer_parts import PlainText
from adaptrt.serve.errors import ApiError
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.tool_guides import GuidedFunction
from adaptrt.serve.tool_use import _check
from support.answers import Answer, joined

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
TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}


@pytest.mark.parametrize(
    ("fields", "strict", "guide"),
    [
        ({}, False, None),
        ({}, True, "calls"),
        ({"parallel_tool_calls": False}, False, "calls"),
        ({"tool_choice": "required"}, False, "calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False, "calls"),
        ({"tool_choice": ALLOWED, "tools": [TOOL, OTHER]}, False, "calls"),
        ({"tool_choice": ALLOWED}, False, None),
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

    service = served("<tool_call>")
    if guide is ApiError:
        with pytest.raises(ApiError, match="given with a guide that is not JSON"):
            asyncio.run(answer_form_of(service, chat, None, ""))
        return
    form = asyncio.run(answer_form_of(service, chat, None, ""))
    assert isinstance(form.make_splitter(), PlainText) == (guide == "no tools")
    if form.guide is None:
        assert guide in (None, "no tools")
    elif form.guide.guide_type == GuidedDecodingParams.GuideType.REGEX:
        assert form.guide.guide == guide
    else:
        assert (guide, form.guide.guide_type) == ("calls", GuidedDecodingParams.GuideType.EBNF_GRAMMAR)


def served(template: str | dict[str, str] | None, **options: str) -> Any:
    """A server whose model has this template."""

    async def tokenizer_of(adapter: str | None) -> Any:
        return SimpleNamespace(vocabulary=SimpleNamespace(special_id=lambda text: None))

    async def template_for(fields: ChatRequest, adapter: str | None) -> Any:
        templates = {"default": template} if isinstance(template, str) else template
        return None if templates is None else ChatTemplate(templates, {}, "t")

    return SimpleNamespace(
        options=SimpleNamespace(**{"tool_call_parser": "auto", "reasoning_parser": "auto", **options}),
        tokenizers=SimpleNamespace(of=tokenizer_of),
        prompts=SimpleNamespace(template_for=template_for),
        executor=SimpleNamespace(compile_guide=lambda _: asyncio.sleep(0)),
    )


def split(service: Any, prompt_end: str, answer: str, **fields: Any) -> Answer:
    """Splits an answer of a model to a chat."""
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    splitter = asyncio.run(answer_form_of(service, asked, "adapter", prompt_end)).make_splitter()
    return joined([*splitter.add(answer), *splitter.finish()])


TOOLS = [{"type": "function", "function": {"name": "f"}}]
HERMES = '<tool_call>{"name": "f"}</tool_call>'
LLAMA = '{"name": "f"}'
NAMED = "[TOOL_CALLS]f[ARGS]{}"
CHOSEN = {
    "the template's": ({}, "<tool_call>", HERMES),
    "that of the template for tools": ({}, {"default": "<tool_call>", "tool_use": "<|python_tag|>"}, LLAMA),
    "a flag's": ({"tool_call_parser": "hermes"}, "<|python_tag|>", HERMES),
    "a flag's without a template": ({"tool_call_parser": "hermes"}, None, HERMES),
    "an alias": ({"tool_call_parser": "llama4_json"}, None, LLAMA),
    "a variant of the flag's": ({"tool_call_parser": "mistral"}, "[TOOL_CALLS]f[ARGS]", NAMED),
    "not a variant of the flag's": ({"tool_call_parser": "granite"}, "functools[", '<|tool_call|>[{"name": "f"}]'),
}


@pytest.mark.parametrize(("options", "template", "answer"), CHOSEN.values(), ids=CHOSEN)
def test_the_template_or_a_flag_chooses_the_format_of_calls(options: Any, template: Any, answer: str) -> None:
    assert split(served(template, **options), "", answer, tools=TOOLS).calls == [("f", {})]


@pytest.mark.parametrize("template", [None, "{{ tools }}"])
def test_tools_need_a_known_format(template: str | None) -> None:
    with pytest.raises(ApiError, match="the chat template does not show how the model writes its calls"):
        split(served(template), "", "", tools=TOOLS)


THOUGHT = "<think>a</think>b"
BOTH = Answer("b", "a", [], "rt")
REASONED = {
    "the template's": ({}, "<think>", "", THOUGHT, BOTH),
    "with a call": ({}, "<think><tool_call>", "", f"<think>a</think>{HERMES}", Answer("", "a", [("f", {})], "rc")),
    "begun by the prompt": ({}, "</think>", "<think>\n", "a</think>b", BOTH),
    "switched off": ({"reasoning_parser": "none"}, "<think>", "", THOUGHT, Answer(THOUGHT, "", [], "t")),
    "a flag's": ({"reasoning_parser": "mistral"}, "<think>", "", "[THINK]a[/THINK]b", BOTH),
    "an alias": ({"reasoning_parser": "deepseek_r1"}, None, "", THOUGHT, BOTH),
    "unknown": ({}, "{{ tools }}", "", THOUGHT, Answer(THOUGHT, "", [], "t")),
}


@pytest.mark.parametrize(("options", "template", "prompt", "answer", "expected"), REASONED.values(), ids=REASONED)
def test_the_template_or_a_flag_chooses_the_format_of_reasoning(
    options: Any, template: Any, prompt: str, answer: str, expected: Answer
) -> None:
    fields = {"tools": TOOLS} if expected.calls else {}
    assert split(served(template, **options), prompt, answer, **fields) == expected


def test_harmony_is_read_with_and_without_tools() -> None:
    service = served("<|channel|><|message|>", reasoning_parser="none")
    message = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f"
    answer = f"{message} <|constrain|>json<|message|>{{}}"
    assert split(service, "", answer, tools=TOOLS) == Answer("", "a", [("f", {})], "rc")
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    form = asyncio.run(answer_form_of(service, ChatRequest.model_validate(asked), None, ""))
    assert form.has_reasoning
    assert form.guide is not None
    assert '"analysis"' in (form.guide.guide or "")
    final = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert split(served("<|channel|><|message|>"), "", final) == BOTH
    assert split(served("<|channel|><|message|>", tool_call_parser="hermes"), "", HERMES, tools=TOOLS).calls
