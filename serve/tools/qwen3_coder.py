"""Calls of Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>."""

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
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_BEGINS: Final = Marks(_BEGIN, _FUNCTION)
_FUNCTION_ENDS: Final = Marks(_FUNCTION_END)
_NAME_END: Final = Marks(">")
_VALUE_ENDS: Final = Marks(_PARAMETER_END, f"\n{_PARAMETER_END}")
_FOLLOWERS: Final = (_PARAMETER, _FUNCTION_END, _END)
_MAX_KEY: Final = 256
_TAGS: Final = Tags(
    before_name=literal(_PARAMETER),
    any_name=r"/[^>\n]+/",
    after_name=r'">\n"',
    text=f"argument_text[suffix={literal(f'{chr(10)}{_PARAMETER_END}{chr(10)}')}]: /(.|\\n)*/",
    end=literal(f"\n{_PARAMETER_END}\n"),
)


class Qwen3CoderForm(CallForm):
    """See the module. A line break at both ends of a value is not part of it. <tool_call> may be missing."""

    marks = (_BEGIN, _END)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while begin := (yield from reader.until(_BEGINS, sink.text)):
            before = reader.take(len(begin))
            if begin == _BEGIN:
                before += yield from reader.take_while(SPACE)
                if not (yield from reader.skip(_FUNCTION)):
                    sink.text(before)
                    continue
                before += _FUNCTION
            name, mark = yield from reader.within(_NAME_END, functions.longest)
            if not mark or name not in functions:
                sink.text(before + name)
                # Calls in the arguments of an unknown function are no calls.
                yield from reader.until(_FUNCTION_ENDS, sink.text)
                continue
            reader.take(len(mark))
            sink.begin(name)
            if not (yield from _read_arguments(reader, sink, functions, name)):
                continue
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(_END)):
                sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        rules = [_TAGS.text]
        for i, call in enumerate(calls):
            arguments, more = argument_rules(i, call, _TAGS)
            rules += more
            rules.append(f'function_{i}: {literal(f"{_FUNCTION}{call.name}>")} "\\n" {arguments}')
        functions = " | ".join(f"function_{i}" for i in range(len(calls)))
        end = f'{literal(_FUNCTION_END)} "\\n" {token(_END)}'
        return CallGrammar(_BEGIN, f'"\\n" ({functions}) {end}', rules, between=r"\n?")


def _read_arguments(reader: TextReader, sink: PartSink, functions: Functions, name: str) -> Steps[bool]:
    """Returns True after the end tag."""
    opening = "{"
    while True:
        yield from reader.take_while(SPACE)
        if (yield from reader.skip(_FUNCTION_END)):
            is_whole = True
            break
        key, mark = "", ""
        if (yield from reader.skip(_PARAMETER)):
            key, mark = yield from reader.within(_NAME_END, _MAX_KEY)
        if not mark:
            if reader.ended:  # the last characters may be part of a tag
                yield from reader.rest(drop)
                return False
            is_whole = False
            break
        reader.take(len(mark))
        yield from reader.skip("\n")
        sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        types = types_of(functions[name], key)
        if not (yield from read_argument(reader, sink.arguments, types, _VALUE_ENDS, _FOLLOWERS)):
            return False
    sink.arguments("{}" if opening == "{" else "}")
    sink.end()
    return is_whole
