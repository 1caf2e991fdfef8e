"""Reads JSON texts in growing text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from .form import CallRule, literal
from .reader import SPACE, Emit, Marks, Steps, TextReader, drop, read_list
from .sink import PartSink

MAX_DEPTH: Final = 100
"""Maximum nesting of arguments. Parsers of JSON, which clients use, recurse."""
_ARGUMENTS: Final = ("arguments", "parameters")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Final = ("true", "false", "null")
_WORD_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-."
_MAX_WORD: Final = 1000
"""Maximum number of characters of a number."""
_ESCAPE: Final = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_IN_STRING: Final = Marks('"', "\\", *map(chr, range(32)))


def read_value(reader: TextReader, emit: Emit) -> Steps[bool]:
    """Reads a JSON value and emits its text as it arrives.

    Returns False if the text stops being JSON, or ends. Then all valid characters have been emitted. Control characters
    in strings are emitted as escape sequences.
    """
    return (yield from _read(reader, emit, [], "value"))


def read_rest_of_object(reader: TextReader, emit: Emit, *, is_value_next: bool) -> Steps[bool]:
    """Reads the rest of an object like read_value(). is_value_next: the place is between a key's colon and its value;
    False: it is after a value.
    """
    return (yield from _read(reader, emit, ["{"], "value" if is_value_next else "after"))


def _read(reader: TextReader, emit: Emit, open_: list[str], expected: str) -> Steps[bool]:
    """expected: "value", "first" (a value or "]"), "key", "first key" (a key or "}"), or "after" (a value)."""
    while True:
        if space := (yield from reader.take_while(SPACE)):
            emit(space)
        letter = yield from reader.ahead(1)
        if expected == "after":
            if letter == ("}" if open_[-1] == "{" else "]"):
                emit(reader.take(1))
                open_.pop()
            elif letter == ",":
                emit(reader.take(1))
                expected = "key" if open_[-1] == "{" else "value"
                continue
            else:
                return False
        elif expected in ("key", "first key"):
            if letter == '"':
                if not (yield from _read_string(reader, emit)):
                    return False
                if space := (yield from reader.take_while(SPACE)):
                    emit(space)
                if not (yield from reader.skip(":")):
                    return False
                emit(":")
                expected = "value"
                continue
            if letter != "}" or expected != "first key":
                return False
            emit(reader.take(1))
            open_.pop()
        elif letter == '"':
            if not (yield from _read_string(reader, emit)):
                return False
        elif letter and letter in "{[":
            if len(open_) == MAX_DEPTH:
                return False
            emit(reader.take(1))
            open_.append(letter)
            expected = "first key" if letter == "{" else "first"
            continue
        elif letter == "]" and expected == "first":
            emit(reader.take(1))
            open_.pop()
        else:
            word = yield from _read_word(reader)
            if not word:
                return False
            emit(word)
        if not open_:
            return True
        expected = "after"


def _read_string(reader: TextReader, emit: Emit) -> Steps[bool]:
    emit(reader.take(1))
    while mark := (yield from reader.until(_IN_STRING, emit)):
        if mark == '"':
            emit(reader.take(1))
            return True
        if mark == "\\":
            found = _ESCAPE.match((yield from reader.ahead(2))) or _ESCAPE.match((yield from reader.ahead(6)))
            if not found:
                break
            emit(reader.take(len(found[0])))
        else:
            emit(json.dumps(reader.take(1))[1:-1])
    return False


def _read_word(reader: TextReader) -> Steps[str]:
    """Returns a number, true, false or null; "" for anything else."""
    word = yield from reader.word(_WORD_LETTERS, _MAX_WORD)
    if word in _WORDS or (_NUMBER.fullmatch(word) and math.isfinite(float(word))):
        return reader.take(len(word))
    return ""


def read_arguments(reader: TextReader, sink: PartSink) -> Steps[bool]:
    """Reads a value as the arguments of the call that has begun. Returns True if they are complete.

    The call ends, unless the answer ends within its arguments.
    """
    is_whole = yield from read_value(reader, sink.arguments)
    if not is_whole and reader.ended:
        # The last characters may be part of a number or of an escape sequence.
        yield from reader.rest(drop)
    else:
        sink.end()
    return is_whole


def read_call(reader: TextReader, sink: PartSink, names: Collection[str], before: str) -> Steps[bool]:
    """Reads {"name": ..., "arguments": {...}} at the place. The arguments may be named "parameters".

    Returns True if the object was a call and has ended. A call begins as soon as its name and the beginning of its
    arguments are known. An object that is no call becomes text, after the text `before`.
    """
    held = [before]
    name: str | None = None
    arguments: str | None = None
    has_begun = False
    first = True

    def hold(text: str) -> None:
        if not has_begun:
            held.append(text)

    def give_up() -> bool:
        if not has_begun:
            sink.text("".join(held))
        return False

    if not (yield from reader.skip("{")):
        return give_up()
    hold("{")
    while True:
        hold((yield from reader.take_while(SPACE)))
        if (yield from reader.skip("}")):
            hold("}")
            break
        if not first:
            if not (yield from reader.skip(",")):
                return give_up()
            hold(",")
            hold((yield from reader.take_while(SPACE)))
        first = False
        if not (yield from reader.starts_with('"')):
            return give_up()
        key: list[str] = []
        is_whole = yield from _read_string(reader, key.append)
        hold("".join(key))
        hold((yield from reader.take_while(SPACE)))
        if not is_whole or not (yield from reader.skip(":")):
            return give_up()
        hold(":")
        hold((yield from reader.take_while(SPACE)))
        field = json.loads("".join(key))
        is_arguments = field in _ARGUMENTS and arguments is None
        if is_arguments and not (yield from reader.starts_with("{")):
            give_up()
            yield from read_rest_of_object(reader, sink.text, is_value_next=True)
            return False
        if is_arguments and name is not None:
            sink.begin(name)
            has_begun = True
            arguments = ""
            if not (yield from read_arguments(reader, sink)):
                return False
            continue
        value: list[str] = []
        is_whole = yield from read_value(reader, value.append)
        hold("".join(value))
        if not is_whole:
            return give_up()
        if is_arguments:
            arguments = "".join(value)
        elif field == "name" and name is None:
            found: Any = json.loads("".join(value))
            if not isinstance(found, str) or found not in names:
                give_up()
                yield from read_rest_of_object(reader, sink.text, is_value_next=False)
                return False
            name = found
    if has_begun:
        return True
    if name is None:
        return give_up()
    sink.call(name, "{}" if arguments is None else arguments)
    return True


def read_call_list(reader: TextReader, sink: PartSink, names: Collection[str], before: str) -> Steps[bool]:
    """Reads [{"name": ..., "arguments": {...}}, ...] at the place. Returns True if it ends and has only calls.

    What is no call becomes text, after the text `before` if no call precedes it.
    """
    return read_list(reader, sink.text, before, lambda before_call: read_call(reader, sink, names, before_call))


def json_call_rules(calls: Sequence[CallRule], key: str) -> list[str]:
    """Returns rules in Lark of which `call` is {"name": ..., key: {...}}."""
    names = [f"function_{i}" for i in range(len(calls))]
    return [
        # The lexer does not backtrack: a call's object begins with the same tokens as any other JSON object.
        r"COLON: /: ?/",
        r"COMMA: /, ?/",
        f'call: "{{" {literal(json.dumps("name"))} COLON ({" | ".join(names)}) "}}"',
        *(
            f"{name}: {literal(json.dumps(call.name, ensure_ascii=False))} COMMA {literal(json.dumps(key))} COLON "
            f"%json {call.schema}"
            for name, call in zip(names, calls, strict=True)
        ),
    ]


def list_body(*, is_single: bool) -> str:
    """Returns an expression in Lark of a list of the rule `call`, or of one."""
    more = "" if is_single else " (COMMA call)*"
    return f'"[" call{more} "]"'
