"""Calls between tags, with a tag around each argument: those of Qwen3-Coder, Seed-OSS and MiniMax M2."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from .form import CallForm, CallGrammar, CallRule, Functions, literal
from .reader import SPACE, Marks, Steps, TextReader, drop
from .sink import PartSink
from .xml_values import Tags, argument_rules, read_argument, types_of

_MAX_KEY: Final = 256
Tag = tuple[str, str, str]
"""Text before a name, text after the name, and the end tag."""


class TaggedForm(CallForm):
    """A block with <function=NAME><parameter=KEY>VALUE</parameter>...</function>, or with other tags. The block's own
    tags may be missing.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        function: Tag = ("<function=", ">", "</function>"),
        parameter: Tag = ("<parameter=", ">", "</parameter>"),
        *,
        has_lines: bool = False,
        has_many: bool = False,
    ) -> None:
        """begin, end: tags around a block. has_lines: values are on lines of their own; a line break at both ends is
        not part of the value. has_many: guides put all calls into one block; False: each call has its own.
        """
        self._begin, self._end = begin, end
        self._function, self._parameter = function, parameter
        self._has_many = has_many
        self._line = "\n" if has_lines else ""
        self.marks = (begin, end)
        self._begins = Marks(begin, function[0])
        self._function_name_end, self._function_end = Marks(function[1]), Marks(function[2])
        self._key_end = Marks(parameter[1])
        self._value_ends = Marks(parameter[2], self._line + parameter[2])
        self._followers = (parameter[0], function[2], end)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm."""
        while begin := (yield from reader.until(self._begins, sink.text)):
            before = reader.take(len(begin))
            if begin == self._begin:
                before += yield from reader.take_while(SPACE)
                if not (yield from reader.skip(self._function[0])):
                    sink.text(before)
                    continue
                before += self._function[0]
            name, mark = yield from reader.within(self._function_name_end, functions.longest)
            if not mark or name not in functions:
                sink.text(before + name)
                # Calls in the arguments of an unknown function are no calls.
                yield from reader.until(self._function_end, sink.text)
                continue
            reader.take(len(mark))
            sink.begin(name)
            if not (yield from self._read_arguments(reader, sink, functions, name)):
                continue
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(self._end)):
                sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        before, after, end = self._parameter
        value_end = literal(f"{self._line}{end}\n")
        tags = Tags(
            before_name=literal(before),
            any_name=rf"/[^{after[0]}>\n]+/",
            after_name=literal(after + self._line),
            text=rf"argument_text[suffix={value_end}]: /(.|\n)*/",
            end=value_end,
        )
        rules = [tags.text]
        for i, call in enumerate(calls):
            arguments, more = argument_rules(i, call, tags)
            rules += more
            name = literal(f"{self._function[0]}{call.name}{self._function[1]}\n")
            rules.append(f"function_{i}: {name} {arguments} {literal(f'{self._function[2]}{chr(10)}')}")
        rules.append(f"function: {' | '.join(f'function_{i}' for i in range(len(calls)))}")
        more_calls = "+" if self._has_many and not is_single else ""
        body = f'"\\n" function{more_calls} {token(self._end)}'
        return CallGrammar(self._begin, body, rules, between=r"\n?", repeats=not self._has_many)

    def _read_arguments(self, reader: TextReader, sink: PartSink, functions: Functions, name: str) -> Steps[bool]:
        """Returns True after the end tag."""
        opening = "{"
        while True:
            yield from reader.take_while(SPACE)
            if (yield from reader.skip(self._function[2])):
                is_whole = True
                break
            key, mark = "", ""
            if (yield from reader.skip(self._parameter[0])):
                key, mark = yield from reader.within(self._key_end, _MAX_KEY)
            if not mark:
                if reader.ended:  # the last characters may be part of a tag
                    yield from reader.rest(drop)
                    return False
                is_whole = False
                break
            reader.take(len(mark))
            yield from reader.skip(self._line)
            sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            types = types_of(functions[name], key)
            if not (yield from read_argument(reader, sink.arguments, types, self._value_ends, self._followers)):
                return False
        sink.arguments("{}" if opening == "{" else "}")
        sink.end()
        return is_whole
