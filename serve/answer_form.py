"""Decides in which format a model answers a conversation, by its chat template or the server's flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .._core import GuidedDecodingParams, RequestError
from .answer_parts import AnswerSplitter, PlainText
from .errors import ApiError
from .openai_chat_fields import ChatRequest
from .service import Service
from .thinking_budget import budget_of
from .tool_use import Reasoning, ToolUse, text_guide_of, tool_use_of
from .tools.form import Functions
from .tools.forms import (
    ALIASES,
    AUTO,
    NONE,
    OPENAI,
    REASONING_ALIASES,
    REASONING_FORMS,
    VARIANTS,
    form_of_template,
    reasoning_of_template,
)
from .tools.harmony import HarmonyForm, HarmonyReasoning
from .tools.reader import Steps, TextReader
from .tools.reasoning import read_text
from .tools.sink import PartSink
from .tools.splitter import FormSplitter


@dataclass(frozen=True)
class AnswerForm:
    """The format of a conversation's answers."""

    make_splitter: Callable[[], AnswerSplitter]
    guide: GuidedDecodingParams | None
    marks: Sequence[str]
    """Texts that the splitter must see even if they are special tokens."""
    has_reasoning: bool
    """True: the splitter finds the model's reasoning."""


async def answer_form_of(
    service: Service,
    fields: ChatRequest,
    adapter: str | None,
    prompt_end: str,
    *,
    max_tokens: int | None = None,
    is_budget_target: bool = False,
) -> AnswerForm:
    """Returns the format of a conversation's answers. prompt_end: last characters of the rendered prompt.

    max_tokens: of the answer; None: not known. is_budget_target: a budget of reasoning that cannot be enforced is
    ignored.

    Raises ApiError like tool_use_of() and budget_of().
    """
    if is_budget_target and fields.max_reasoning_tokens is not None:
        try:
            form = await answer_form_of(service, fields, adapter, prompt_end, max_tokens=max_tokens)
            if form.guide is not None:
                await service.executor.compile_guide(form.guide)
        except (ApiError, RequestError):
            fields = fields.model_copy(update={"thinking_token_budget": None})
        else:
            return form
    has_tools = bool(fields.called_tools)
    template = await service.prompts.template_for(fields, adapter)
    source = None if template is None else template.text(with_tools=has_tools)
    options = service.options
    shown_calls = None if source is None else form_of_template(source)
    shown_reasoning = None if source is None else reasoning_of_template(source)
    calls = _named(options.tool_call_parser, ALIASES, shown_calls)
    name = _named(options.reasoning_parser, REASONING_ALIASES, shown_reasoning)
    reasoning: Reasoning | None = None
    if has_tools and calls == OPENAI:
        # Reasoning and calls are channels of the same format.
        name = _HARMONY
    elif has_tools and name == _HARMONY:
        name = None
    reasoning_form = None if name is None else REASONING_FORMS[name]
    opened = "" if reasoning_form is None else reasoning_form.opened_by(prompt_end)
    budget = await budget_of(service, fields, reasoning_form, opened, max_tokens)
    if reasoning_form is not None:
        reasoning = Reasoning(reasoning_form, opened, budget)
    tool_use = await tool_use_of(service, fields, calls, reasoning) if has_tools else None
    guide = await text_guide_of(service, fields, reasoning) if tool_use is None else tool_use.guide
    if tool_use is None and reasoning is None:
        return AnswerForm(PlainText, guide, (), has_reasoning=False)
    marks = (*(() if tool_use is None else tool_use.form.marks), *(() if reasoning is None else reasoning.form.marks))
    return AnswerForm(
        lambda: FormSplitter(lambda reader, sink: _read(reader, sink, tool_use, reasoning), opened),
        guide,
        marks,
        has_reasoning=reasoning is not None,
    )


_HARMONY = next(name for name, form in REASONING_FORMS.items() if isinstance(form, HarmonyReasoning))


def _named(flag: str, aliases: Mapping[str, str], shown: str | None) -> str | None:
    """Returns the name of a format: the flag's, or the one that the template shows."""
    chosen = aliases.get(flag, flag)
    if chosen == NONE:
        return None
    return shown if chosen == AUTO or (shown is not None and VARIANTS.get(shown) == chosen) else chosen


def _read(reader: TextReader, sink: PartSink, tool_use: ToolUse | None, reasoning: Reasoning | None) -> Steps[None]:
    def read_answer(reader: TextReader, sink: PartSink) -> Steps[None]:
        if tool_use is not None:
            return tool_use.form.read(reader, sink, tool_use.functions)
        if reasoning is not None and isinstance(reasoning.form, HarmonyReasoning):
            return HarmonyForm().read(reader, sink, Functions({}))
        return read_text(reader, sink)

    return read_answer(reader, sink) if reasoning is None else reasoning.form.read(reader, sink, read_answer)
