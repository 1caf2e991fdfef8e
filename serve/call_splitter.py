"""Splits answers with the parsers of function calls."""

from __future__ import annotations

from collections.abc import Sequence

from .answer_parts import AnswerPart, CallArguments, CallBegin, CallEnd, TextPart
from .tool_calls import FunctionCall, ToolCallParser


class CallSplitter:
    """Splitter of answers with calls, which a parser finds when they are complete."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def add(self, text: str) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        return self._parts(self._parser.add(text))

    def finish(self) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        return self._parts(self._parser.finish())

    def _parts(self, found: Sequence[str | FunctionCall]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for item in found:
            if isinstance(item, str):
                parts.append(TextPart(item))
                continue
            index = self._num_calls
            parts += (CallBegin(index, item.call_id, item.name), CallArguments(index, item.arguments), CallEnd(index))
            self._num_calls += 1
        return parts
