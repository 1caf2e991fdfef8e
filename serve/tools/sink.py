"""Collects the parts of an answer that a parser finds."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence

from ..answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart


class PartSink:
    """Parts of one answer in order. Whitespace around calls and at both ends of the reasoning is dropped."""

    def __init__(self, place: Callable[[], int]) -> None:
        """place: returns the number of characters of the answer that have been read."""
        self.place = place
        self.num_calls = 0
        """Number of calls that have begun."""
        self.has_text = False
        """True: the answer has text outside of calls."""
        self.reasoning_spans: list[tuple[int, float]] = []
        """Places in the answer at which reasoning begins and ends; infinity: not yet."""
        self._parts: list[AnswerPart] = []
        self._space = ""
        """Whitespace that is dropped if a call follows."""
        self._is_after_reasoning = False
        self._ids: set[str] = set()
        self._reasoning_space: str | None = None
        """Whitespace in the reasoning that is dropped if the reasoning ends; None: nothing else precedes it."""

    def take(self) -> Sequence[AnswerPart]:
        """Returns the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def text(self, text: str) -> None:
        """Adds text outside of calls, the last that has been read."""
        if self._is_after_reasoning:
            text = text.lstrip()
            self._is_after_reasoning = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            end = self.place() - len(self._space)
            self._parts.append(TextPart(shown, end - len(shown), end))
            self.has_text = True

    def begin_reasoning(self, place: int) -> None:
        """Begins reasoning at a place of the answer."""
        self.reasoning_spans.append((place, math.inf))

    def reasoning(self, text: str) -> None:
        """Adds text of the reasoning."""
        text = text.lstrip() if self._reasoning_space is None else self._reasoning_space + text
        shown = text.rstrip()
        if shown:
            self._parts.append(ReasoningPart(shown))
        if shown or self._reasoning_space is not None:
            self._reasoning_space = text[len(shown) :]

    def end_reasoning(self, place: int) -> None:
        """Ends the reasoning: whitespace that follows is dropped. More reasoning begins with a line break."""
        self.reasoning_spans[-1] = (self.reasoning_spans[-1][0], place)
        self._is_after_reasoning = True
        if self._reasoning_space is not None:
            self._reasoning_space = "\n"

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begins a call. call_id: the model's, which is replaced if another call has it; None: a new one."""
        self._space = ""
        self._is_after_reasoning = False
        if call_id is None or call_id in self._ids:
            call_id = f"call_{uuid.uuid4().hex}"
        self._ids.add(call_id)
        self._parts.append(CallBegin(self.num_calls, call_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds characters of the arguments of the call that began last."""
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Ends the call that began last."""
        self._parts.append(CallEnd(self.num_calls - 1))

    def call(self, name: str, arguments: str) -> None:
        """Adds a whole call."""
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def finish(self) -> None:
        """Ends the answer."""
        if self._space and not self.num_calls:
            self._parts.append(TextPart(self._space))
        self._space = ""
