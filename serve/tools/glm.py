"""Calls of GLM-4.5: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal
from .reader import SPACE, Marks, Steps, TextReader, drop
from .sink import PartSink
from .xml_values import Tags, argument_rules, read_argument, types_of

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_BEGINS: Final = Marks(_BEGIN)
_ENDS: Final = Marks(_END)
_NAME_ENDS: Final = Marks("\n", _KEY, _END)
_KEY_ENDS: Final = Marks(_KEY_END)
_VALUE_ENDS: Final = Marks(_VALUE_END)
_FOLLOWERS: Final = (_KEY, _END)
_MAX_KEY: Final = 256


class GlmForm(CallForm):
    """See the module. Line breaks between the tags are optional."""

    marks = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while (yield from reader.until(_BEGINS, sink.text)):
            before = reader.take(len(_BEGIN)) + (yield from reader.take_while(SPACE))
            name, mark = yield from reader.within(_NAME_ENDS, functions.longest)
            if not mark or name not in functions:
                sink.text(before + name)
                # Calls in the arguments of an unknown function are no calls.
                yield from reader.until(_ENDS, sink.text)
                continue
            sink.begin(name)
            yield from _read_arguments(reader, sink, functions, name)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        end = token(_VALUE_END)
        is_text = end == literal(_VALUE_END)
        tags = Tags(
            before_name=token(_KEY),
            any_name=r"/[^<\n]+/",
            after_name=f'{token(_KEY_END)} "\\n" {token(_VALUE)}',
            text=r"argument_text: any_text /\n/" if is_text else rf"argument_text: /(.|\n)*/ {end} /\n/",
            end=rf"{end} /\n/",
        )
        rules = [tags.text]
        if is_text:
            rules.append(rf"any_text[suffix={end}]: /(.|\n)*/")
        for i, call in enumerate(calls):
            arguments, more = argument_rules(i, call, tags)
            rules += more
            rules.append(f'function_{i}: {literal(call.name)} "\\n" {arguments}')
        functions = " | ".join(f"function_{i}" for i in range(len(calls)))
        return CallGrammar(_BEGIN, f"({functions}) {token(_END)}", rules, between=r"\n?")


def _read_arguments(reader: TextReader, sink: PartSink, functions: Functions, name: str) -> Steps[None]:
    opening = "{"
    while True:
        yield from reader.take_while(SPACE)
        if (yield from reader.skip(_END)):
            break
        key, mark = "", ""
        if (yield from reader.skip(_KEY)):
            key, mark = yield from reader.within(_KEY_ENDS, _MAX_KEY)
            reader.take(len(mark))
            yield from reader.take_while(SPACE)
        if not mark or not (yield from reader.skip(_VALUE)):
            if reader.ended:  # the last characters may be part of a tag
                yield from reader.rest(drop)
                return
            break
        sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        types = types_of(functions[name], key)
        if not (yield from read_argument(reader, sink.arguments, types, _VALUE_ENDS, _FOLLOWERS)):
            return
    sink.arguments("{}" if opening == "{" else "}")
    sink.end()
