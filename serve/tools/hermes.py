"""Calls of Hermes, Qwen and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions
from .json_text import json_call_rules, read_call
from .reader import SPACE, Marks, Steps, TextReader
from .sink import PartSink

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_MARKS: Final = Marks(_BEGIN)


class HermesForm(CallForm):
    """See the module. Text may stand between calls. The last call may lack its end tag."""

    marks = (_BEGIN, _END)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while (yield from reader.until(_MARKS, sink.text)):
            before = reader.take(len(_BEGIN)) + (yield from reader.take_while(SPACE))
            if not (yield from read_call(reader, sink, functions, before)):
                continue
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(_END)):
                sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        space = r"(/[ \n]/)?"
        rules = json_call_rules(calls, "arguments")
        return CallGrammar(_BEGIN, f"{space} call {space} {token(_END)}", rules, between=r"\n?")
