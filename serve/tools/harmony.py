"""Harmony, GPT-OSS's format: messages in the channels analysis (reasoning), commentary (calls) and final (text)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal, rule_until
from .json_text import read_arguments
from .reader import SPACE, Marks, Steps, TextReader
from .reasoning import Answers, Budget, ReadAnswer, ReasoningForm
from .sink import PartSink

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_END: Final = "<|end|>"
_CALL: Final = "<|call|>"
_RETURN: Final = "<|return|>"
_MARKS: Final = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
_ROLE: Final = "assistant"
_ANALYSIS: Final = "analysis"
_COMMENTARY: Final = "commentary"
_FINAL: Final = "final"
_NAMESPACE: Final = "functions."
_HEAD_ENDS: Final = Marks(_MESSAGE, _END, _CALL, _RETURN)
_BODY_ENDS: Final = Marks(_END, _CALL, _RETURN, _START)
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME: Final = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")
_OPENED: Final = re.compile(rf"{re.escape(_START)}{_ROLE}({re.escape(_CHANNEL)}\w+{re.escape(_MESSAGE)})\Z")
_MAX_HEAD: Final = 256


class HarmonyForm(CallForm):
    """Calls of harmony: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>."""

    marks = _MARKS

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm; also reads the reasoning. An answer that does not begin with a head is text."""
        while True:
            space = yield from reader.take_while(SPACE)
            if (yield from reader.skip(_START)):
                yield from reader.skip(_ROLE)
                space = yield from reader.take_while(SPACE)
            has_head = (yield from reader.starts_with(_CHANNEL)) or (yield from reader.starts_with("to="))
            if not has_head:
                sink.text(space)
                yield from reader.rest(sink.text)
                return
            begin = reader.place
            head, mark = yield from reader.within(_HEAD_ENDS, _MAX_HEAD)
            if mark != _MESSAGE:
                if not reader.ended:
                    sink.text(head)
                continue
            reader.take(len(mark))
            yield from _read_body(reader, sink, functions, head, begin)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm. The model ends its answer after a call, so there is only one."""
        functions = [
            f"function_{i}: {literal(f'{_COMMENTARY} to={_NAMESPACE}{call.name}')} json {token(_MESSAGE)} "
            f"%json {call.schema}"
            for i, call in enumerate(calls)
        ]
        rules = [*functions, f'json: " "? ({token(_CONSTRAIN)} "json")?']
        body = " | ".join(f"function_{i}" for i in range(len(calls)))
        return CallGrammar(_CHANNEL, body, rules, repeats=False, is_text_apart=True)


class HarmonyReasoning(ReasoningForm):
    """The channel analysis of harmony. HarmonyForm reads the whole answer."""

    marks = _MARKS

    def opened_by(self, prompt_end: str) -> str:
        """See ReasoningForm."""
        found = _OPENED.search(prompt_end)
        return found[1] if found else ""

    def read(self, reader: TextReader, sink: PartSink, read_answer: ReadAnswer) -> Steps[None]:
        """See ReasoningForm."""
        yield from read_answer(reader, sink)

    def ends(self, opened: str) -> Sequence[str]:
        """See ReasoningForm."""
        return (_END,)

    def rules(
        self, opened: str, answers: Answers, token: Callable[[str], str], budget: Budget | None = None
    ) -> Sequence[str]:
        """See ReasoningForm."""
        channel, message, start = token(_CHANNEL), token(_MESSAGE), f'{token(_START)} "{_ROLE}"'
        final = f'{channel} "{_FINAL}" {message} {answers.text}'
        if opened.startswith(f"{_CHANNEL}{_FINAL}") and answers.text is not None:
            return [f"start: {answers.text}"]
        last = " | ".join(([answers.calls] if answers.calls else []) + ([final] if answers.text else []))
        if budget is not None:
            # The budget is that of the whole answer, so there is one message of reasoning.
            is_analysis = opened.startswith(f"{_CHANNEL}{_ANALYSIS}")
            first = f"{'spent' if is_analysis else 'ended'} {start} " if opened else ""
            return [
                f"start: {first}preamble* {'' if is_analysis else '(analysis preamble*)? '}({last})",
                f'preamble: {channel} "{_COMMENTARY}" {message} ended {start}',
                f'analysis: {channel} "{_ANALYSIS}" {message} spent {start}',
                budget.rule("spent", _END),
                *rule_until("ended", _END, token),
            ]
        first = f"ended {start} " if opened else ""
        return [
            f"start: {first}before* ({last})",
            f'before: {channel} ("{_ANALYSIS}" | "{_COMMENTARY}") {message} ended {start}',
            *rule_until("ended", _END, token),
        ]


def _read_body(reader: TextReader, sink: PartSink, functions: Functions, head: str, begin: int) -> Steps[None]:
    """Reads a message after its head, which began at a place."""
    recipient, channel = _RECIPIENT.search(head), _CHANNEL_NAME.search(head)
    name = recipient[1].removeprefix(_NAMESPACE) if recipient else ""
    if name in functions:
        sink.begin(name)
        yield from reader.take_while(SPACE)
        if not (yield from reader.starts_with("{")):
            sink.arguments("{}")
            sink.end()
        elif not (yield from read_arguments(reader, sink)):
            return
        yield from reader.take_while(SPACE)
    if channel and channel[1] == _ANALYSIS and name not in functions:
        sink.begin_reasoning(begin)
        mark = yield from reader.until(_BODY_ENDS, sink.reasoning)
        if mark:
            reader.take(len(mark) if mark != _START else 0)
            sink.end_reasoning(reader.place)
        return
    if sink.has_text and name not in functions:
        sink.text("\n")
    mark = yield from reader.until(_BODY_ENDS, sink.text)
    reader.take(len(mark) if mark != _START else 0)
