"""Sections of calls between markers, as several models write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .form import Functions
from .reader import SPACE, Marks, Steps, TextReader
from .sink import PartSink

ReadCall: TypeAlias = Callable[[TextReader, PartSink, Functions, str], Steps[bool]]
"""Reads a call after its first marker, given the text before. Returns True after its last marker."""


@dataclass(frozen=True)
class Section:
    """The markers of a section: it has one call or more, each with a first marker."""

    begin: str
    end: str
    call: str

    def read(self, reader: TextReader, sink: PartSink, functions: Functions, read_call: ReadCall) -> Steps[None]:
        """Reads texts and sections to the end. What is no call is text."""
        begins = Marks(self.begin, self.call)
        while mark := (yield from reader.until(begins, sink.text)):
            before = reader.take(len(mark))
            if mark == self.begin:
                before += yield from reader.take_while(SPACE)
                if not (yield from reader.skip(self.call)):
                    sink.text(before)
                    continue
                before += self.call
            if not (yield from read_call(reader, sink, functions, before)):
                continue
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(self.end)):
                sink.text(space)
