"""Texts that end an answer, searched in text that comes piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from .._core import RequestError

_FIRST_MARK: Final = 0xD800
_MOST_MARKS: Final = 0x800
"""Half of a letter of UTF-16, which no text has, stands for a token that the text leaves out."""


class StopTexts:
    """Holds text back while it may be the beginning of a stop text, and ends it before the first one.

    The first is the one that ends first, and the longest of those that end there. A stop text may have the names of
    special tokens. It is then found where these tokens came, whether or not the text shows them; other tokens that the
    text leaves out may be between them.
    """

    def __init__(self, stop: Sequence[str], hidden: Mapping[int, str]) -> None:
        """`hidden`: names of tokens that the text leaves out, by id. Raises RequestError for an empty stop text."""
        if not all(stop):
            raise RequestError("stop has an empty string; leave it out, or give the text that ends an answer")
        self.stopped: str | None = None
        """The stop text that ended the text; None: none did so far."""
        self._patterns: list[tuple[str, str]] = []
        self._marks: dict[int, str] = {}
        self._held = ""
        if not stop:
            return
        named = [(token_id, name) for token_id, name in hidden.items() if name and any(name in text for text in stop)]
        if len(named) > _MOST_MARKS:
            raise RequestError(f"stop has the names of {len(named)} special tokens; expected at most {_MOST_MARKS}")
        self._marks = {token_id: chr(_FIRST_MARK + i) for i, (token_id, _) in enumerate(named)}
        of_name = {name: self._marks[token_id] for token_id, name in named}
        # The longest of the names that begin alike.
        names = re.compile("|".join(map(re.escape, sorted(of_name, key=len, reverse=True))) or r"(?!)")
        marked = ((names.sub(lambda found: of_name[found[0]], text), text) for text in stop)
        # Each is searched as it is written, and with marks for the tokens that it names.
        self._patterns = [(text, text) for text in stop] + [(made, text) for made, text in marked if made != text]

    def mark(self, token_id: int) -> str:
        """A letter to add() for a token that the text leaves out; "" for one that is in no stop text."""
        return self._marks.get(token_id, "")

    def add(self, text: str) -> str:
        """Takes the next text, with marks where tokens were left out, and returns what may be shown now."""
        if not self._patterns:
            return text
        text = self._held + text
        has_marks = bool(self._marks) and not text.isascii()
        found = []
        first_held = len(text)
        for pattern, stop in self._patterns:
            searched, places = self._without_marks(text, but=pattern) if has_marks else (text, range(len(text)))
            if (begin := searched.find(pattern)) != -1:
                found.append((places[begin + len(pattern) - 1] + 1, places[begin], stop))
            elif length := _overlap(searched, pattern):
                first_held = min(first_held, places[len(searched) - length])
        if found:
            # The one that ends first, and of those the longest.
            _, first_held, self.stopped = min(found)
        self._held = "" if found else text[first_held:]
        return self._without_marks(text[:first_held])[0] if has_marks else text[:first_held]

    def finish(self) -> str:
        """The rest of the text, when no more comes."""
        rest, self._held = self._without_marks(self._held)[0], ""
        return rest

    def _without_marks(self, text: str, but: str = "") -> tuple[str, Sequence[int]]:
        """A text without marks, except those in `but`, and the place of each letter in the text with all marks."""
        last = _FIRST_MARK + _MOST_MARKS
        places = [i for i, letter in enumerate(text) if not _FIRST_MARK <= ord(letter) < last or letter in but]
        return "".join(text[i] for i in places), places


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop text begins with, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
