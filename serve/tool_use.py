"""Decides how a chat's answer may call the functions of its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .._core import GuidedDecodingParams, RequestError
from .answer_parts import AnswerSplitter
from .errors import ApiError
from .openai_chat_fields import ChatRequest
from .openai_guides import guide_of, json_schema_of
from .service import Service
from .tool_guides import GuidedFunction, tool_guide
from .tools.form import Functions
from .tools.forms import ALIASES, AUTO, FORMS, LLAMA3_JSON, form_of_template
from .tools.splitter import FormSplitter

_JSON_SCHEMA: Final = GuidedDecodingParams.GuideType.JSON_SCHEMA


@dataclass(frozen=True)
class ToolUse:
    """The guide that makes the model write calls, and the splitter that finds them."""

    make_splitter: Callable[[], AnswerSplitter]
    marks: Sequence[str]
    """Texts that the splitter must see even if they are special tokens."""
    guide: GuidedDecodingParams | None
    """Guide of the whole answer including calls; None: no guide."""


async def tool_use_of(service: Service, fields: ChatRequest, adapter: str | None) -> ToolUse | None:
    """Returns how the request's functions are called; None: the answer calls none. adapter: writes the answer.

    The answer needs a guide if a function is strict, a call is required, or only one call is allowed. Raises ApiError
    for functions that this server cannot offer, and for parameters that no guide can enforce.
    """
    choice = fields.tool_choice
    if not fields.tools or choice.mode == "none":
        return None
    is_forced = choice.mode == "required"
    form_name = await _form_of(service, fields, adapter)
    if form_name is None and not is_forced:
        raise ApiError(
            "tools: the chat template does not show how the model writes its calls, and the server was started without "
            f"--tool_call_parser ({', '.join(FORMS)}); accepted: tool_choice 'none', 'required' or a function's name",
            param="tools",
        )
    # A guide can force any model into this format: it needs no tags.
    form = FORMS[form_name or LLAMA3_JSON]
    functions = [
        GuidedFunction(tool.function.name, tool.function.parameters, tool.function.strict, f"tools[{i}].function")
        for i, tool in enumerate(fields.tools)
        if choice.name in (None, tool.function.name)
    ]
    guide = content = guide_of(fields)
    schema = None if content is None else json_schema_of(content)
    is_held = is_forced or not fields.parallel_tool_calls or any(function.is_strict for function in functions)
    if is_held and content is not None and schema is None:
        raise ApiError(
            "tools that are strict, required or not parallel are given with a guide that is not JSON; expected a JSON "
            "schema, or no guide"
        )
    if is_held or schema is not None:
        # Guides are compiled for the model's own tokenizer.
        vocabulary = (await service.tokenizers.of(None)).vocabulary
        guide = tool_guide(
            form,
            functions,
            is_forced=is_forced,
            is_single=choice.name is not None or not fields.parallel_tool_calls,
            content=schema,
            special=vocabulary.special_id,
        )
        await _check(service, guide, functions, is_forced)
    callable_ = Functions({function.name: function.parameters for function in functions})
    return ToolUse(lambda: FormSplitter(lambda reader, sink: form.read(reader, sink, callable_)), form.marks, guide)


async def _form_of(service: Service, fields: ChatRequest, adapter: str | None) -> str | None:
    """Returns the name of the format of calls: the one that the server was started with, or else the template's."""
    chosen = ALIASES.get(service.options.tool_call_parser, service.options.tool_call_parser)
    template = await service.prompts.template_for(fields, adapter)
    shown = None if template is None else form_of_template(template.text(with_tools=True))
    # Some formats have variants, which one name stands for.
    if chosen == AUTO or (shown is not None and type(FORMS[shown]) is type(FORMS[chosen])):
        return shown
    return chosen


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
