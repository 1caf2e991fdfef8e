"""Calls of DeepSeek V3 and V3.1, between markers that are special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal
from .json_text import read_arguments, read_value
from .reader import SPACE, Marks, Steps, TextReader
from .section import Section
from .sink import PartSink

_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_TYPE: Final = "function"
_FENCE: Final = "```json"
_FENCE_END: Final = "```"
_SECTION: Final = Section(_BEGIN, _END, _CALL)
_NAME_ENDS: Final = Marks(_SEPARATOR, _CALL_END)
_FENCES: Final = Marks(_FENCE, _CALL_END)


class DeepSeekForm(CallForm):
    """V3 writes the type, the name and the arguments in a block of code; V3.1 only the name and the arguments. Both are
    parsed.
    """

    marks = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR)

    def __init__(self, *, is_fenced: bool) -> None:
        """is_fenced: guides make V3's form."""
        self._is_fenced = is_fenced

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        return _SECTION.read(reader, sink, functions, _read_call)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        separator = token(_SEPARATOR)
        rules = []
        for i, call in enumerate(calls):
            arguments = f"%json {call.schema}"
            if self._is_fenced:
                begin = f"{literal(_TYPE)} {separator} {literal(call.name)} {literal(f'{chr(10)}{_FENCE}{chr(10)}')}"
                rules.append(f"function_{i}: {begin} {arguments} {literal(f'{chr(10)}{_FENCE_END}')}")
            else:
                rules.append(f"function_{i}: {literal(call.name)} {separator} {arguments}")
        functions = " | ".join(f"function_{i}" for i in range(len(calls)))
        rules.append(f"call: {token(_CALL)} ({functions}) {token(_CALL_END)}")
        between = r"/\n?/ " if self._is_fenced else ""
        more = "" if is_single else f" ({between}call)*"
        return CallGrammar(_BEGIN, f"call{more} {token(_END)}", rules, repeats=False)


def _read_call(reader: TextReader, sink: PartSink, functions: Functions, before: str) -> Steps[bool]:
    """Reads a call after its first marker. Returns True after its last marker."""
    name, mark = yield from reader.within(_NAME_ENDS, max(functions.longest, len(_TYPE)))
    read = before + name
    if mark == _SEPARATOR:
        read += reader.take(len(mark))
        space = yield from reader.take_while(SPACE)
        read += space
        if name == _TYPE and not (yield from reader.starts_with("{")):
            name, mark = yield from reader.within(_FENCES, functions.longest + 2)
            read += name
            name = name.strip()
            if mark == _FENCE:
                read += reader.take(len(mark)) + (yield from reader.take_while(SPACE))
    if mark not in (_SEPARATOR, _FENCE) or not (yield from reader.starts_with("{")):
        sink.text(read)
        return False
    if name not in functions:
        sink.text(read)
        # Markers in the arguments of an unknown function are no calls.
        yield from read_value(reader, sink.text)
        return False
    sink.begin(name)
    if not (yield from read_arguments(reader, sink)):
        return False
    space = yield from reader.take_while(SPACE)
    if mark == _FENCE and (yield from reader.skip(_FENCE_END)):
        space = yield from reader.take_while(SPACE)
    if not (yield from reader.skip(_CALL_END)):
        sink.text(space)
        return False
    return True
