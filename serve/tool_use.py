"""Decides how a chat's answer may call the functions of its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .._core import GuidedDecodingParams, RequestError
from .errors import ApiError
from .openai_chat_fields import ChatRequest
from .openai_guides import guide_of, json_schema_of
from .service import Service
from .tool_guides import GuidedFunction, guide_after_reasoning, tool_guide
from .tools.form import CallForm, Functions
from .tools.forms import FORMS, LLAMA3_JSON
from .tools.reasoning import Budget, ReasoningForm

_JSON_SCHEMA: Final = GuidedDecodingParams.GuideType.JSON_SCHEMA


@dataclass(frozen=True)
class Reasoning:
    """How the model reasons before an answer."""

    form: ReasoningForm
    opened: str
    """Beginning of the reasoning that the prompt has already."""
    budget: Budget | None = None
    """None: the reasoning may have any length."""


@dataclass(frozen=True)
class ToolUse:
    """The format in which the model writes calls, and the guide that makes it do so."""

    form: CallForm
    functions: Functions
    guide: GuidedDecodingParams | None
    """Guide of the whole answer including calls; None: no guide."""


async def text_guide_of(
    service: Service, fields: ChatRequest, reasoning: Reasoning | None
) -> GuidedDecodingParams | None:
    """Returns the guide of an answer that calls no functions; None: it has none."""
    guide = guide_of(fields)
    if reasoning is None or (guide is None and reasoning.budget is None):
        return guide
    vocabulary = (await service.tokenizers.of(None)).vocabulary
    return guide_after_reasoning(guide, reasoning.form, reasoning.opened, vocabulary.special_id, reasoning.budget)


async def tool_use_of(
    service: Service, fields: ChatRequest, form_name: str | None, reasoning: Reasoning | None
) -> ToolUse:
    """Returns how the request's functions are called. form_name: format of the model's calls; None: not known.

    The answer needs a guide if a function is strict, a call is required, or only some functions or one call are
    allowed. Raises ApiError for functions that this server cannot offer, and for parameters that no guide can enforce.
    """
    choice = fields.tool_choice
    is_forced = choice.mode == "required"
    if form_name is None and not is_forced:
        raise ApiError(
            "tools: the chat template does not show how the model writes its calls, and the server was started without "
            f"--tool-call-parser ({', '.join(FORMS)}); accepted: tool_choice 'none', 'required' or a function's name",
            param="tools",
        )
    # A guide can force any model into this format: it needs no tags.
    form = FORMS[form_name or LLAMA3_JSON]
    functions = [
        GuidedFunction(tool.function.name, tool.function.parameters, tool.function.strict, f"tools[{i}].function")
        for i, tool in enumerate(fields.tools or ())
        if choice.can_call(tool.function.name)
    ]
    content = guide_of(fields)
    schema = None if content is None else json_schema_of(content)
    is_held = (
        is_forced
        or not fields.parallel_tool_calls
        or len(functions) < len(fields.tools or ())
        or any(function.is_strict for function in functions)
    )
    if is_held and content is not None and schema is None:
        raise ApiError(
            "tools that are strict, required, not parallel or not all allowed are given with a guide that is not JSON; "
            "expected a JSON schema, or no guide"
        )
    has_budget = reasoning is not None and reasoning.budget is not None
    if is_held or schema is not None or (has_budget and content is None):
        # Guides are compiled for the model's own tokenizer.
        vocabulary = (await service.tokenizers.of(None)).vocabulary
        guide: GuidedDecodingParams | None = tool_guide(
            form,
            functions,
            is_forced=is_forced,
            is_single=choice.name is not None or not fields.parallel_tool_calls,
            content=schema,
            special=vocabulary.special_id,
            reasoning=None if reasoning is None else reasoning.form,
            opened="" if reasoning is None else reasoning.opened,
            budget=None if reasoning is None else reasoning.budget,
        )
        assert guide is not None
        await _check(service, guide, functions, is_forced)
    else:
        guide = await text_guide_of(service, fields, reasoning)
    return ToolUse(form, Functions({function.name: function.parameters for function in functions}), guide)


async def _check(
    service: Service, guide: GuidedDecodingParams, functions: Sequence[GuidedFunction], is_forced: bool
) -> None:
    """Raises ApiError that names the function whose parameters no guide can enforce."""
    try:
        await service.executor.compile_guide(guide)
    except RequestError:
        for function in functions:
            schema = GuidedDecodingParams(_JSON_SCHEMA, function.schema(is_forced=is_forced))
            try:
                await service.executor.compile_guide(schema)
            except RequestError as error:
                field = f"{function.place}.parameters"
                raise ApiError(f"{field} of '{function.name}' cannot be enforced: {error}", param=field) from error
        raise
