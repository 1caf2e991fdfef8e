"""Answers of models in their own formats, split into parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adaptrt.serve.answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from adaptrt.serve.tools.form import Functions
from adaptrt.serve.tools.forms import FORMS
from adaptrt.serve.tools.splitter import FormSplitter


@dataclass
class Answer:
    """The parts of an answer, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names and arguments; arguments that are not JSON are texts."""
    order: str = ""
    """Kinds of the parts in order; consecutive parts of a kind count once. t: text, r: reasoning, c: call, x: a call
    that has not ended.
    """


def joined(parts: Iterable[AnswerPart]) -> Answer:
    """Joins parts, and checks that they follow AnswerSplitter's rules."""
    answer = Answer()
    arguments: list[str] = []
    ids: set[str] = set()
    running: int | None = None
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart):
            assert running is None
            assert part.text
            kind = "t" if isinstance(part, TextPart) else "r"
            if kind == "t":
                answer.text += part.text
            else:
                answer.reasoning += part.text
            answer.order += "" if answer.order.endswith(kind) else kind
        elif isinstance(part, CallBegin):
            assert running is None
            assert part.index == len(answer.calls)
            running = part.index
            assert part.call_id not in ids
            ids.add(part.call_id)
            answer.calls.append((part.name, ""))
            arguments.append("")
        else:
            assert part.index == running
            if isinstance(part, CallArguments):
                arguments[-1] += part.text
            else:
                assert isinstance(part, CallEnd)
                answer.order += "c"
                running = None
    answer.order += "" if running is None else "x"
    answer.calls = [(name, _value(text)) for (name, _), text in zip(answer.calls, arguments, strict=True)]
    return answer


def split(form: str, pieces: Iterable[str], functions: Mapping[str, Any]) -> Answer:
    """Splits an answer of a format that arrives in pieces. functions: parameters by name."""
    splitter = FormSplitter(lambda reader, sink: FORMS[form].read(reader, sink, Functions(functions)))
    parts = [part for piece in pieces for part in splitter.add(piece)]
    return joined([*parts, *splitter.finish()])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
