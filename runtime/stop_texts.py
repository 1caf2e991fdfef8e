"""Finds texts that end an answer in text that arrives piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from .._core import RequestError

_FIRST_MARK: Final = 0xD800
_MOST_MARKS: Final = 0x800
"""Surrogates, which no text contains, mark tokens that the text leaves out."""


class StopTexts:
    """Holds back text that may begin a stop text, and ends the text before the first stop text.

    The first one is the one that ends first; of several that end there, the longest. A stop text may contain names of
    special tokens. It then matches these tokens even if the text does not show them; other tokens that the text leaves
    out may be between them.
    """

    def __init__(self, stop: Sequence[str], hidden: Mapping[int, str], *, include_stop: bool = False) -> None:
        """hidden: names of tokens that the text leaves out, by id. include_stop: the text ends after the stop text.

        Raises RequestError for an empty stop text.
        """
        if not all(stop):
            raise RequestError("stop has an empty string; leave it out, or give the text that ends an answer")
        self._include_stop = include_stop
        self.stopped: str | None = None
        """The stop text that ended the text; None: none yet."""
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
        # Longer names come first, so that the longest match counts.
        names = re.compile("|".join(map(re.escape, sorted(of_name, key=len, reverse=True))) or r"(?!)")
        marked = ((names.sub(lambda found: of_name[found[0]], text), text) for text in stop)
        # Each stop text is searched as written, and also with marks for the tokens that it names.
        self._patterns = [(text, text) for text in stop] + [(made, text) for made, text in marked if made != text]

    def mark(self, token_id: int) -> str:
        """Returns the character to add() for a token that the text leaves out; "" if no stop text names the token."""
        return self._marks.get(token_id, "")

    def add(self, text: str) -> str:
        """Adds text, with marks for left-out tokens. Returns the text that can be shown now."""
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
            # The one that ends first; of several, the longest.
            _, first_held, self.stopped = min(found)
        self._held = "" if found else text[first_held:]
        shown = self._without_marks(text[:first_held])[0] if has_marks else text[:first_held]
        return shown + self.stopped if self._include_stop and self.stopped is not None else shown

    def finish(self) -> str:
        """Returns the rest at the end of the text."""
        rest, self._held = self._without_marks(self._held)[0], ""
        return rest

    def _without_marks(self, text: str, but: str = "") -> tuple[str, Sequence[int]]:
        """Returns a text without marks except those in `but`, and each character's position in the original text."""
        last = _FIRST_MARK + _MOST_MARKS
        places = [i for i, letter in enumerate(text) if not _FIRST_MARK <= ord(letter) < last or letter in but]
        return "".join(text[i] for i in places), places


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that the text ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
