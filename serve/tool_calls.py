"""Parsers of function calls in a model's answer, while it is being generated."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

HERMES: Final = "hermes"
LLAMA3_JSON: Final = "llama3_json"


@dataclass(frozen=True)
class FunctionCall:
    """A function call with its arguments as a JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")


class ToolCallParser(ABC):
    """Parses an answer piece by piece into text and calls, in order.

    Text that looks like a call stays text if its JSON is wrong or it names an unknown function. Whitespace around calls
    is dropped.
    """

    def __init__(self, names: Collection[str]) -> None:
        """names: functions of the request."""
        self._names = names
        self._has_calls = False
        self._space = ""
        """Whitespace that is dropped if a call follows."""

    @abstractmethod
    def add(self, text: str) -> list[str | FunctionCall]:
        """Adds a piece of the answer. Returns the parts that are certain now."""

    @abstractmethod
    def finish(self) -> list[str | FunctionCall]:
        """Returns the rest at the end of the answer."""

    def _shown(self, text: str) -> list[str | FunctionCall]:
        """Returns text outside calls; holds back whitespace at its end."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [shown] if shown else []

    def _called(self, call: FunctionCall) -> list[str | FunctionCall]:
        self._space = ""
        self._has_calls = True
        return [call]

    def _rest(self) -> list[str | FunctionCall]:
        space, self._space = self._space, ""
        return [space] if space and not self._has_calls else []


class HermesParser(ToolCallParser):
    """Parses <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the format of Hermes, Qwen and others."""

    _BEGIN: Final = "<tool_call>"
    _END: Final = "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        """See ToolCallParser."""
        super().__init__(names)
        self._held = ""
        """Text that may begin a tag; inside a call, the call."""
        self._end: _EndTag | None = None
        """The search for the end of a call; None: outside of calls."""
        self._minds_strings = True
        """False: a string did not end, so from here on an end tag counts inside strings too."""

    def add(self, text: str) -> list[str | FunctionCall]:
        """See ToolCallParser."""
        found: list[str | FunctionCall] = []
        self._held += text
        while True:
            begin = self._held.find(self._BEGIN) if self._end is None else self._end.find(self._held)
            if begin == -1:
                break
            if self._end is None:
                found += self._shown(self._held[:begin])
                self._held, self._end = self._held[begin + len(self._BEGIN) :], self._end_tag()
            else:
                found += self._call_until(begin)
        if self._end is not None:
            return found
        kept = next((n for n in range(len(self._BEGIN) - 1, 0, -1) if self._held.endswith(self._BEGIN[:n])), 0)
        cut = len(self._held) - kept
        found += self._shown(self._held[:cut])
        self._held = self._held[cut:]
        return found

    def finish(self) -> list[str | FunctionCall]:
        """See ToolCallParser; a last call may lack its end tag."""
        found: list[str | FunctionCall] = []
        if self._end is not None and self._END in self._held:
            # No text is searched more than twice: a model can be made to write any number of such strings.
            self._minds_strings = False
            self._end = self._end_tag()
            found += self.add("")
        held, self._held = self._held, ""
        found += self._shown(held) if self._end is None else self._call(held, "")
        return found + self._rest()

    def _end_tag(self) -> _EndTag:
        return _EndTag(self._END, minds_strings=self._minds_strings)

    def _call_until(self, end: int) -> list[str | FunctionCall]:
        """Returns the held call up to its end tag, and holds the text after the tag."""
        call, self._held, self._end = self._held[:end], self._held[end + len(self._END) :], None
        return self._call(call, self._END)

    def _call(self, text: str, end: str) -> list[str | FunctionCall]:
        call = _call_of(_json_of(text), self._names)
        return self._shown(f"{self._BEGIN}{text}{end}") if call is None else self._called(call)


class _EndTag:
    """Finds the first tag in a growing text. Reads each character once."""

    def __init__(self, tag: str, *, minds_strings: bool) -> None:
        """minds_strings: True: tags inside JSON strings do not count."""
        self._tag = tag
        self._minds_strings = minds_strings
        self._place = 0
        self._is_string = False
        self._is_escaped = False

    def find(self, text: str) -> int:
        """Returns the position of the tag; -1: it may still come."""
        for place in range(self._place, len(text)):
            character = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"' and self._minds_strings:
                self._is_string = not self._is_string
            elif self._is_string:
                self._is_escaped = character == "\\"
            elif character == self._tag[0]:
                if text.startswith(self._tag, place):
                    return place
                if self._tag.startswith(text[place:]):
                    self._place = place
                    return -1
        self._place = len(text)
        return -1


class Llama3JsonParser(ToolCallParser):
    """Parses {"name": ..., "parameters": {...}} as the whole answer, optionally after <|python_tag|>. Further calls may
    follow after ";".
    """

    _TAG: Final = "<|python_tag|>"
    _BETWEEN: Final = " \t\r\n;"

    def __init__(self, names: Collection[str]) -> None:
        """See ToolCallParser."""
        super().__init__(names)
        self._held = ""
        self._object = _ObjectEnd()
        self._is_text = False
        """True: the rest of the answer is text."""

    def add(self, text: str) -> list[str | FunctionCall]:
        """See ToolCallParser."""
        if self._is_text:
            return self._shown(text)
        self._held += text
        found: list[str | FunctionCall] = []
        while not self._is_text:
            begin = self._begin_of_object()
            if begin is None or (end := self._object.find(self._held, begin)) is None:
                break
            call = _call_of(_json_of(self._held[begin:end]), self._names)
            if call is None:
                self._is_text = True
                break
            found += self._called(call)
            self._held, self._object = self._held[end:], _ObjectEnd()
        return found + self._given_up() if self._is_text else found

    def finish(self) -> list[str | FunctionCall]:
        """See ToolCallParser."""
        if self._has_calls and not self._held.strip(self._BETWEEN):
            self._held = ""
        return self._given_up() + self._rest()

    def _given_up(self) -> list[str | FunctionCall]:
        held, self._held = self._held, ""
        return self._shown(held)

    def _begin_of_object(self) -> int | None:
        """Returns the position of the object in the held text; None: not found yet. Sets _is_text if none can come."""
        rest = self._held.lstrip(self._BETWEEN if self._has_calls else None)
        if rest.startswith(self._TAG):
            rest = rest[len(self._TAG) :].lstrip()
        if rest.startswith("{"):
            return len(self._held) - len(rest)
        self._is_text = not self._TAG.startswith(rest)
        return None


class _ObjectEnd:
    """Finds the end of a JSON object in a growing text. Reads each character once."""

    def __init__(self) -> None:
        self._place: int | None = None
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def find(self, text: str, begin: int) -> int | None:
        """Returns the position after the object at `begin`, which must not change; None: it has not ended."""
        for place in range(begin if self._place is None else self._place, len(text)):
            character = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        self._place = len(text)
        return None


PARSERS: Final[Mapping[str, type[ToolCallParser]]] = {HERMES: HermesParser, LLAMA3_JSON: Llama3JsonParser}
"""Parsers by their names for --tool_call_parser."""


def _json_of(text: str) -> Any:
    """Returns the parsed JSON; None for invalid JSON, because null is no call either."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _call_of(content: Any, names: Collection[str]) -> FunctionCall | None:
    if not isinstance(content, dict) or content.get("name") not in list(names):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        # Characters are escaped: models can write halves of surrogate pairs, which UTF-8 cannot encode.
        return FunctionCall(content["name"], json.dumps(arguments, allow_nan=False))
    except (ValueError, RecursionError):  # numbers out of range became infinite
        return None
