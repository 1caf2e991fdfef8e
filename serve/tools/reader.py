"""Reads an answer's text while it arrives. Parsers are generators: each yields when it needs more text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser. It yields when it needs more text, and returns a T."""
Emit: TypeAlias = Callable[[str], None]

SPACE: Final = " \t\r\n"


def drop(text: str) -> None:
    """Emits nothing."""


class Marks:
    """Texts to search for. Of two at the same place, the longer one is found."""

    def __init__(self, *marks: str) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self.longest: Final = max(map(len, marks), default=0)

    def find(self, text: str, first: int, last: int | None = None) -> re.Match[str] | None:
        """Returns the first mark that begins at the place `first` or later. last: it begins at this place or before."""
        return self._pattern.search(text, first, len(text) if last is None else last + self.longest)

    def first_open(self, text: str, first: int) -> int:
        """Returns the first place from which the end of the text may become a mark; the text's length: none."""
        for place in range(max(first, len(text) - self.longest + 1), len(text)):
            rest = text[place:]
            if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self._marks):
                return place
        return len(text)


class TextReader:
    """A growing text and a place in it.

    No result depends on how the text is cut into pieces: each method waits until it is certain.
    """

    def __init__(self) -> None:
        self.ended = False
        """True: no more text arrives."""
        self._text = ""
        self._at = 0
        self._num_dropped = 0

    @property
    def place(self) -> int:
        """Number of characters before the place."""
        return self._num_dropped + self._at

    @property
    def num_left(self) -> int:
        """Number of characters after the place that have arrived."""
        return len(self._text) - self._at

    def add(self, text: str) -> None:
        """Adds text at the end."""
        self._num_dropped += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, length: int) -> str:
        """Moves over characters that have arrived, and returns them."""
        taken = self._text[self._at : self._at + length]
        self._at += len(taken)
        return taken

    def ahead(self, length: int) -> Steps[str]:
        """Returns the next characters without moving; fewer than `length` at the end of the text."""
        while len(self._text) - self._at < length and not self.ended:
            yield
        return self._text[self._at : self._at + length]

    def starts_with(self, text: str) -> Steps[bool]:
        """True if the rest starts with a text."""
        while True:
            rest = self._text[self._at : self._at + len(text)]
            if rest == text:
                return True
            if self.ended or not text.startswith(rest):
                return False
            yield

    def skip(self, text: str) -> Steps[bool]:
        """Moves over a text if the rest starts with it. Returns True if it does."""
        found = yield from self.starts_with(text)
        if found:
            self._at += len(text)
        return found

    def word(self, letters: str, limit: int) -> Steps[str]:
        """Returns the next characters that are in `letters`, at most `limit`, without moving."""
        length = 0
        while True:
            end = len(self._text) - self._at
            while length < min(end, limit) and self._text[self._at + length] in letters:
                length += 1
            if length < end or length == limit or self.ended:
                return self._text[self._at : self._at + length]
            yield

    def take_while(self, letters: str) -> Steps[str]:
        """Moves over all next characters that are in `letters`, and returns them."""
        taken = ""
        while True:
            begin = self._at
            while self._at < len(self._text) and self._text[self._at] in letters:
                self._at += 1
            taken += self._text[begin : self._at]
            if self._at < len(self._text) or self.ended:
                return taken
            yield

    def until(self, marks: Marks, emit: Emit) -> Steps[str]:
        """Moves to the first of the marks and emits the text before it. Returns the mark; "" at the end of the text."""
        while True:
            found = marks.find(self._text, self._at)
            open_at = len(self._text) if self.ended else marks.first_open(self._text, self._at)
            if found and found.start() < open_at:
                self._emit_to(found.start(), emit)
                return found[0]
            # A mark that begins earlier, or that is longer, may still arrive.
            self._emit_to(open_at, emit)
            if self.ended:
                return ""
            yield

    def within(self, marks: Marks, limit: int) -> Steps[tuple[str, str]]:
        """Moves to the first of the marks if at most `limit` characters precede it. Returns the text before it, and the
        mark. Without a mark it moves over `limit` characters, or to the text's end, and returns "" as the mark.
        """
        while True:
            found = marks.find(self._text, self._at, self._at + limit)
            open_at = len(self._text) if self.ended else marks.first_open(self._text, self._at)
            if found and found.start() < open_at:
                length = found.start() - self._at
                return self.take(min(length, limit)), found[0] if length <= limit else ""
            if self.ended or open_at - self._at > limit:
                return self.take(limit), ""
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Emits all text up to the end."""
        yield from self.until(_NO_MARKS, emit)

    def _emit_to(self, place: int, emit: Emit) -> None:
        if place > self._at:
            emit(self.take(place - self._at))


_NO_MARKS: Final = Marks()


def read_list(reader: TextReader, emit: Emit, before: str, read_item: Callable[[str], Steps[bool]]) -> Steps[bool]:
    """Reads [item, item, ...] at the place. Returns True if the list ends and `read_item` accepts all of its items.

    read_item: reads an item, and returns True if it is whole. Argument: the text between the item before and this one,
    which becomes text if there is no item. emit: gets text that belongs to no item; for the first item, it begins with
    `before`.
    """
    if not (yield from reader.skip("[")):
        emit(before)
        return False
    before += "["
    while True:
        before += yield from reader.take_while(SPACE)
        if not (yield from read_item(before)):
            return False
        space = yield from reader.take_while(SPACE)
        if (yield from reader.skip("]")):
            return True
        if not (yield from reader.skip(",")):
            emit(space)
            return False
        before = ","
