"""Splits answers with the parsers of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..answer_parts import AnswerPart
from .reader import Steps, TextReader
from .sink import PartSink


class FormSplitter:
    """Splitter of answers in a model's own format."""

    def __init__(self, read: Callable[[TextReader, PartSink], Steps[None]], opened: str = "") -> None:
        """read: parses an answer up to its end. opened: text of the answer's format that the prompt ends with."""
        self._num_opened = len(opened)
        self._reader = TextReader()
        self._reader.add(opened)
        self._sink = PartSink(lambda: self._reader.place - self._num_opened)
        self._steps = read(self._reader, self._sink)

    @property
    def reasoning_spans(self) -> Sequence[tuple[float, float]]:
        """See AnswerSplitter."""
        return [(begin - self._num_opened, end - self._num_opened) for begin, end in self._sink.reasoning_spans]

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
