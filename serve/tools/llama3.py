"""Calls of Llama 3: {"name": ..., "parameters": {...}} as the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions
from .json_text import json_call_rules, read_call
from .reader import SPACE, Steps, TextReader
from .sink import PartSink

_TAG: Final = "<|python_tag|>"


class Llama3Form(CallForm):
    """See the module. The tag <|python_tag|> may precede each call. Further calls may follow after ";"."""

    marks = (_TAG,)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        between = SPACE
        while True:
            before = yield from reader.take_while(between)
            if (yield from reader.skip(_TAG)):
                before += _TAG + (yield from reader.take_while(SPACE))
            elif not (yield from reader.ahead(1)) and sink.num_calls:
                return
            if not (yield from read_call(reader, sink, functions, before)):
                break
            between = f"{SPACE};"
        yield from reader.rest(sink.text)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        return CallGrammar(
            _TAG,
            "call",
            json_call_rules(calls, "parameters"),
            between="; ?",
            is_marker_optional=True,
            is_text_apart=True,
            # An answer without calls must not begin like a call: the parser would take it for one.
            text=r"\s*(([^\s{<]|<[^|])(.|\n)*)?",
        )
