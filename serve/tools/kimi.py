"""Calls of Kimi K2, between markers that are special tokens, with the names as parts of ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal
from .json_text import read_arguments, read_value
from .reader import SPACE, Marks, Steps, TextReader
from .section import Section
from .sink import PartSink

_BEGIN: Final = "<|tool_calls_section_begin|>"
_END: Final = "<|tool_calls_section_end|>"
_CALL: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_SECTION: Final = Section(_BEGIN, _END, _CALL)
_ID_ENDS: Final = Marks(_ARGUMENTS, _CALL_END)
_PREFIX: Final = "functions."
_ID: Final = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s:]+)(?::[0-9]+)?\s*")
_MAX_NUMBER: Final = 16
"""Maximum number of characters of an id in addition to the prefix and the name."""


class KimiForm(CallForm):
    """A section of calls, each with the id functions.NAME:NUMBER. The template writes ids again, so they are kept."""

    marks = (_BEGIN, _END, _CALL, _ARGUMENTS, _CALL_END)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        return _SECTION.read(reader, sink, functions, _read_call)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        rules = [
            f"function_{i}: {literal(f'{_PREFIX}{call.name}:')} /[0-9]+/ {token(_ARGUMENTS)} %json {call.schema}"
            for i, call in enumerate(calls)
        ]
        functions = " | ".join(f"function_{i}" for i in range(len(calls)))
        rules.append(f"call: {token(_CALL)} ({functions}) {token(_CALL_END)}")
        return CallGrammar(_BEGIN, f"call{'' if is_single else '+'} {token(_END)}", rules, repeats=False)


def _read_call(reader: TextReader, sink: PartSink, functions: Functions, before: str) -> Steps[bool]:
    """Reads a call after its first marker. Returns True after its last marker."""
    call_id, mark = yield from reader.within(_ID_ENDS, len(_PREFIX) + functions.longest + _MAX_NUMBER)
    before += call_id
    if mark == _ARGUMENTS:
        before += reader.take(len(mark)) + (yield from reader.take_while(SPACE))
    if mark != _ARGUMENTS or not (yield from reader.starts_with("{")):
        sink.text(before)
        return False
    found = _ID.fullmatch(call_id)
    if found is None or found["name"] not in functions:
        sink.text(before)
        # Markers in the arguments of an unknown function are no calls.
        yield from read_value(reader, sink.text)
        return False
    sink.begin(found["name"], call_id.strip())
    if not (yield from read_arguments(reader, sink)):
        return False
    space = yield from reader.take_while(SPACE)
    if not (yield from reader.skip(_CALL_END)):
        sink.text(space)
        return False
    return True
