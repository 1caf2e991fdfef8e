"""Calls as one JSON list after a marker: Granite's, and both of Phi-4's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .form import CallForm, CallGrammar, CallRule, Functions
from .json_text import json_call_rules, list_body, read_call_list
from .reader import SPACE, Marks, Steps, TextReader
from .sink import PartSink


class CallListForm(CallForm):
    """A marker and [{"name": ..., "arguments": {...}}, ...]. Text may precede the marker."""

    def __init__(self, begin: str, end: str = "", *, others: Sequence[tuple[str, str]] = ()) -> None:
        """begin: marker before the list. end: marker after it; "": none. others: more pairs that answers may have."""
        self._begin = begin
        self._ends = {begin: end, **dict(others)}
        self.marks = tuple(mark for pair in self._ends.items() for mark in pair if mark)
        self._marks = Marks(*self._ends)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm. The last list may lack its end marker."""
        while begin := (yield from reader.until(self._marks, sink.text)):
            before = reader.take(len(begin)) + (yield from reader.take_while(SPACE))
            if not (yield from read_call_list(reader, sink, functions, before)):
                continue
            if end := self._ends[begin]:
                space = yield from reader.take_while(SPACE)
                if not (yield from reader.skip(end)):
                    sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        end = self._ends[self._begin]
        body = list_body(is_single=is_single) + (f" {token(end)}" if end else "")
        return CallGrammar(self._begin, body, json_call_rules(calls, "arguments"), repeats=False)
