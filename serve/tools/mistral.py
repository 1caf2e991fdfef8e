"""Calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal
from .json_text import json_call_rules, list_body, read_arguments, read_call, read_call_list, read_value
from .reader import SPACE, Marks, Steps, TextReader
from .sink import PartSink

_BEGIN: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_ID: Final = "[CALL_ID]"
_BEGINS: Final = Marks(_BEGIN)
_AFTER_NAME: Final = Marks(_ARGUMENTS, _ID, "{")
_AFTER_ID: Final = Marks(_ARGUMENTS)
_MAX_ID: Final = 64


class MistralForm(CallForm):
    """See the module. Both forms are parsed. An id of a call is not used: calls get new ones."""

    marks = (_BEGIN, _ARGUMENTS, _ID)

    def __init__(self, *, is_named: bool) -> None:
        """is_named: guides make the second form."""
        self._is_named = is_named

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while (yield from reader.until(_BEGINS, sink.text)):
            before = reader.take(len(_BEGIN)) + (yield from reader.take_while(SPACE))
            # A list begins with a bracket and an object; [ARGS] without a name is no list.
            if (yield from reader.starts_with("[")):
                yield from read_call_list(reader, sink, functions, before)
            elif (yield from reader.starts_with("{")):
                yield from read_call(reader, sink, functions, before)
            else:
                yield from _read_named(reader, sink, functions, before)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        if not self._is_named:
            rules = json_call_rules(calls, "arguments")
            return CallGrammar(_BEGIN, list_body(is_single=is_single), rules, repeats=False)
        rules = [
            f"function_{i}: {literal(call.name)} {token(_ARGUMENTS)} %json {call.schema}"
            for i, call in enumerate(calls)
        ]
        return CallGrammar(_BEGIN, " | ".join(f"function_{i}" for i in range(len(calls))), rules)


def _read_named(reader: TextReader, sink: PartSink, functions: Functions, before: str) -> Steps[None]:
    name, mark = yield from reader.within(_AFTER_NAME, functions.longest)
    read = before + name
    if mark == _ID:
        read += reader.take(len(mark))
        number, mark = yield from reader.within(_AFTER_ID, _MAX_ID)
        read += number
    if mark == _ARGUMENTS:
        read += reader.take(len(mark)) + (yield from reader.take_while(SPACE))
    if name not in functions or not mark or not (yield from reader.starts_with("{")):
        sink.text(read)
        if mark:
            yield from read_value(reader, sink.text)
        return
    sink.begin(name)
    yield from read_arguments(reader, sink)
