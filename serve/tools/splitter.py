"""Splits answers with the parsers of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..answer_parts import AnswerPart
from .reader import Steps, TextReader
from .sink import PartSink


class FormSplitter:
    """Splitter of answers in a model's own format."""

    def __init__(self, read: Callable[[TextReader, PartSink], Steps[None]]) -> None:
        """read: parses an answer up to its end."""
        self._reader = TextReader()
        self._sink = PartSink()
        self._steps = read(self._reader, self._sink)

    def add(self, text: str) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        self._reader.add(text)
        next(self._steps, None)
        return self._sink.take()

    def finish(self) -> Sequence[AnswerPart]:
        """See AnswerSplitter."""
        self._reader.ended = True
        for _ in self._steps:
            raise AssertionError("a parser waits for text after the end of the answer")
        self._sink.finish()
        return self._sink.take()
