"""Reads values that are not JSON, such as Python's literals, in growing text, and emits them as JSON.

A string may have JSON's escape sequences too: guides write strings as JSON does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .json_text import MAX_DEPTH
from .reader import SPACE, Emit, Marks, Steps, TextReader

_WORDS: Final[Mapping[str, str]] = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"
}  # fmt: skip
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_WORD_LETTERS: Final = f"{_LETTERS}+-."
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_WORD: Final = 1000
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(0010[0-9a-fA-F]{4}|000[0-9a-fA-F]{5})|(.))", re.DOTALL
)
_ESCAPED: Final[Mapping[str, str]] = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_LONGEST_ESCAPE: Final = len("\\U0010ffff")


@dataclass(frozen=True)
class LiteralStyle:
    """How a format writes values."""

    quotes: tuple[str, ...]
    """Texts around strings; a longer one precedes its beginning."""
    has_escapes: bool
    has_bare_keys: bool
    """True: keys of objects are written without quotes."""


PYTHON: Final = LiteralStyle(('"""', "'''", '"', "'"), has_escapes=True, has_bare_keys=False)


def read_name(reader: TextReader, longest: int) -> Steps[str]:
    """Moves over a name of at most `longest` characters, and returns it. It may have dots and hyphens inside."""
    name = yield from reader.word(f"{_LETTERS}.-", longest + 1)
    return reader.take(len(name))


def read_literal(reader: TextReader, emit: Emit, style: LiteralStyle, depth: int = 0) -> Steps[bool]:
    """Reads a value and emits it as JSON while it arrives. Returns False if the text stops being one, or ends."""
    for quote in style.quotes:
        if (yield from reader.skip(quote)):
            return (yield from _read_string(reader, emit, quote, style))
    if depth == MAX_DEPTH:
        return False
    for begin, end in ("[]", "{}"):
        if (yield from reader.skip(begin)):
            emit(begin)
            return (yield from _read_items(reader, emit, style, end, depth + 1))
    word = yield from reader.word(_WORD_LETTERS, _MAX_WORD)
    written = _WORDS.get(word)
    if written is None and _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        written = word
    if written is None:
        return False
    reader.take(len(word))
    emit(written)
    return True


def _read_items(reader: TextReader, emit: Emit, style: LiteralStyle, end: str, depth: int) -> Steps[bool]:
    """Reads the rest of a list or an object. A comma may precede its end."""
    before = ""
    while True:
        yield from reader.take_while(SPACE)
        if (yield from reader.skip(end)):
            emit(end)
            return True
        if before and not (yield from _skip_comma(reader)):
            return False
        if before and (yield from reader.skip(end)):
            emit(end)
            return True
        emit(before)
        before = ", "
        if end == "}":
            if not (yield from _read_key(reader, emit, style)):
                return False
            yield from reader.take_while(SPACE)
        if not (yield from read_literal(reader, emit, style, depth)):
            return False


def _skip_comma(reader: TextReader) -> Steps[bool]:
    found = yield from reader.skip(",")
    yield from reader.take_while(SPACE)
    return found


def _read_key(reader: TextReader, emit: Emit, style: LiteralStyle) -> Steps[bool]:
    """Reads a key of an object and the colon after it."""
    for quote in style.quotes:
        if (yield from reader.skip(quote)):
            if not (yield from _read_string(reader, emit, quote, style)):
                return False
            break
    else:
        key = (yield from reader.word(_WORD_LETTERS, _MAX_WORD)) if style.has_bare_keys else ""
        if not key:
            return False
        reader.take(len(key))
        emit(json.dumps(key))
    yield from reader.take_while(SPACE)
    if not (yield from reader.skip(":")):
        return False
    emit(": ")
    return True


def _read_string(reader: TextReader, emit: Emit, quote: str, style: LiteralStyle) -> Steps[bool]:
    """Reads a string after its first quote."""

    def emit_text(text: str) -> None:
        if text:
            emit(json.dumps(text, ensure_ascii=False)[1:-1])

    emit('"')
    marks = Marks(quote, "\\") if style.has_escapes else Marks(quote)
    while mark := (yield from reader.until(marks, emit_text)):
        if mark == quote:
            reader.take(len(mark))
            emit('"')
            return True
        found = _ESCAPE.match((yield from reader.ahead(2))) or _ESCAPE.match((yield from reader.ahead(_LONGEST_ESCAPE)))
        if not found:  # the answer ends here
            return False
        if found[4] in ("x", "u", "U"):
            longer = _ESCAPE.match((yield from reader.ahead(_LONGEST_ESCAPE)))
            if longer is None or longer[4]:
                return False
            found = longer
        reader.take(len(found[0]))
        code = found[1] or found[2] or found[3]
        if code:
            emit(json.dumps(chr(int(code, 16)))[1:-1])
        else:
            # Python keeps a backslash that begins no escape sequence.
            emit_text(_ESCAPED.get(found[4], found[0]))
    return False
