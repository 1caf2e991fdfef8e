"""Parts of a model's answer: text, reasoning and function calls. All routes of conversations render the same parts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextPart:
    """New text of the answer."""

    text: str
    begin: int = field(default=0, compare=False)
    """Place in the whole answer, in characters. Tokens from this place on have the text."""
    end: float = field(default=math.inf, compare=False)
    """Place at which the text ends."""


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """New text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A function call begins."""

    index: int
    """Index of the call among the answer's calls."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """New characters of a call's arguments, which are a JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are complete."""

    index: int


def parsed_arguments(text: str) -> Any:
    """Returns the arguments of a complete call. Halves of surrogate pairs, which UTF-8 cannot encode, become U+FFFD."""
    written = json.dumps(json.loads(text), ensure_ascii=False)
    return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


AnswerPart: TypeAlias = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd


class AnswerSplitter(Protocol):
    """Splits an answer, piece by piece, into parts in the order in which the model wrote them.

    Each CallBegin is followed by any number of CallArguments of the same index, and then its CallEnd, with no other
    part in between. A call that the answer's end cuts may lack its CallEnd.
    """

    @property
    def reasoning_spans(self) -> Sequence[tuple[float, float]]:
        """Places in the answer's text, in characters, at which reasoning begins and ends; infinity: not yet."""

    def add(self, text: str) -> Sequence[AnswerPart]:
        """Adds a piece of the answer's text. Returns the parts that are certain now."""

    def finish(self) -> Sequence[AnswerPart]:
        """Returns the rest at the end of the answer."""


class PlainText:
    """Splitter of answers that are only text."""

    reasoning_spans: Sequence[tuple[float, float]] = ()

    def add(self, text: str) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        return (TextPart(text),) if text else ()

    def finish(self) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        return ()
