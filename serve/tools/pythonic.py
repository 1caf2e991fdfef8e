"""Calls as Python writes them: Llama 4's [name(key=value), ...], and those of Gemma 3 and LFM2 after a marker."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...common.shown_value import shown
from ...runtime.guided_decoding import with_json_options
from ..errors import ApiError
from .form import CallForm, CallGrammar, CallRule, Functions, literal, ordered_rules
from .literals import PYTHON, read_literal, read_name
from .reader import SPACE, Marks, Steps, TextReader, drop, read_list
from .sink import PartSink

_START: Final = "<|python_start|>"
_END: Final = "<|python_end|>"
_MAX_KEY: Final = 256


class PythonicForm(CallForm):
    """A list of calls as the whole answer, optionally between <|python_start|> and <|python_end|>."""

    marks = (_START, _END)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        before = yield from reader.take_while(SPACE)
        has_start = yield from reader.skip(_START)
        if has_start:
            before += _START + (yield from reader.take_while(SPACE))
        if (yield from _read_list(reader, sink, functions, before)) and has_start:
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(_END)):
                sink.text(space)
        yield from reader.rest(sink.text)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        # An answer without calls must not begin like a list.
        text = r"\s*(([^\s\[<]|<[^|])(.|\n)*)?"
        body = _list_body(is_single=is_single)
        return CallGrammar(
            _START, body, call_rules(calls), repeats=False, is_marker_optional=True, is_text_apart=True, text=text
        )


class PythonicBlockForm(CallForm):
    """Blocks with a list of calls, or one call, between two markers. Text may precede each."""

    def __init__(self, begin: str, end: str, space: str = "") -> None:
        """space: text that guides write between a marker and the list."""
        self._begin, self._end, self._space = begin, end, space
        self._begins = Marks(begin)
        self.marks = (begin, end)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while (yield from reader.until(self._begins, sink.text)):
            before = reader.take(len(self._begin)) + (yield from reader.take_while(SPACE))
            if (yield from reader.starts_with("[")):
                is_whole = yield from _read_list(reader, sink, functions, before)
            else:
                is_whole = yield from _read_call(reader, sink, functions, before)
            if is_whole:
                space = yield from reader.take_while(SPACE)
                if not (yield from reader.skip(self._end)):
                    sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        space = literal(self._space)
        body = f"{space} {_list_body(is_single=is_single)} {space} {token(self._end)}"
        return CallGrammar(self._begin, body, call_rules(calls), repeats=False)


def _list_body(*, is_single: bool) -> str:
    return f'"[" call{"" if is_single else " (COMMA call)*"} "]"'


def _read_list(reader: TextReader, sink: PartSink, functions: Functions, before: str) -> Steps[bool]:
    """Reads a list of calls. Returns True if it ends and has only calls. Else the rest is text."""
    return read_list(reader, sink.text, before, lambda before_call: _read_call(reader, sink, functions, before_call))


def _read_call(reader: TextReader, sink: PartSink, functions: Functions, before: str) -> Steps[bool]:
    """Reads a call. Returns True after its closing parenthesis. Text that is no call is emitted after `before`."""
    name = yield from read_name(reader, functions.longest)
    before += name
    if name not in functions or not (yield from reader.skip("(")):
        sink.text(before)
        return False
    before += "(" + (yield from reader.take_while(SPACE))
    key = yield from _read_key(reader)
    if not key and not (yield from reader.starts_with(")")):
        sink.text(before)
        return False
    sink.begin(name)
    opening = "{"
    while key:
        sink.arguments(f"{opening}{json.dumps(key)}: ")
        opening = ", "
        if not (yield from read_literal(reader, sink.arguments, PYTHON)):
            break
        yield from reader.take_while(SPACE)
        if not (yield from reader.skip(",")):
            key = ""
            break
        yield from reader.take_while(SPACE)
        key = yield from _read_key(reader)
    if not key and (yield from reader.skip(")")):
        sink.arguments("{}" if opening == "{" else "}")
        sink.end()
        return True
    if reader.ended:
        # The last characters may be part of a value.
        yield from reader.rest(drop)
    else:
        sink.end()
    return False


def _read_key(reader: TextReader) -> Steps[str]:
    """Moves over the name of an argument and the equals sign after it. Returns ""  without moving for anything else."""
    for length in range(1, _MAX_KEY):
        text = yield from reader.ahead(length)
        if len(text) < length or not (text[:-1].isidentifier() if text.endswith("=") else text.isidentifier()):
            return ""
        if text.endswith("="):
            reader.take(length)
            return text[:-1]
    return ""


def call_rules(calls: Sequence[CallRule]) -> list[str]:
    """Returns rules in Lark of which `call` is a call in Python. Arguments are in the order of the schema."""
    rules = [
        r"COMMA: /, ?/",
        f"call: {' | '.join(f'function_{i}' for i in range(len(calls)))}",
    ]
    for i, call in enumerate(calls):
        rules += _argument_rules(i, call)
        rules.append(f'function_{i}: {literal(call.name)} "(" arguments_{i} ")"')
    return rules


def _argument_rules(index: int, call: CallRule) -> list[str]:
    """Returns rules of which arguments_INDEX are the arguments of a call."""
    root = {} if call.parameters is None else call.parameters
    any_value = f"%json {with_json_options('{}', call.options)}"
    any_argument = rf'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {any_value}'
    if call.parameters is None or "properties" not in root:
        return [f"arguments_{index}: (any_{index} (COMMA any_{index})*)?", f"any_{index}: {any_argument}"]
    for name in root["properties"]:
        if not name.isidentifier():
            field = f"{call.place}.parameters.properties"
            raise ApiError(
                f"{field} of '{call.name}' has {shown(name)}; expected names of arguments in Python, because the model "
                "writes calls as Python does",
                param=field,
            )
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    names = list(root["properties"])
    items = [f"{literal(f'{name}=')} {_value(root['properties'][name], shared, call)}" for name in names]
    return ordered_rules(f"arguments_{index}", items, [name in (root.get("required") or ()) for name in names])


def _value(schema: Any, shared: dict[str, Any], call: CallRule) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean":
        return '("True" | "False")'
    whole = {**schema, **shared} if isinstance(schema, dict) else schema
    return f"%json {with_json_options(json.dumps(whole), call.options)}"
