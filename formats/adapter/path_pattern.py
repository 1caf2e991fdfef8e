"""Regular expressions of module paths, matched in time linear in the pattern and the path.

adapter_config.json holds regular expressions, and adapters come from untrusted sources. `re` backtracks, so a pattern
like (a*)*b could keep it busy for years. Here a pattern becomes a program whose threads advance together, one character
at a time (K. Thompson, "Regular Expression Search Algorithm", 1968).

The body of a lookaround is a program of its own, which runs over the path first. A lookahead runs from the path's end,
so that at each position it is known what follows. Adapters of vision models use one to exclude the vision tower:
^(?!.*visual).*(?:q_proj|v_proj).

Flags and features that need backtracking (backreferences, possessive and atomic groups) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

MAX_PATTERN_LENGTH: Final = 2000
MAX_PATTERNS: Final = 1000
"""Maximum number of regular expressions in one field; each is tried on each module. Plain names do not count."""
MAX_INSTRUCTIONS: Final = 5000
"""Maximum size of a program. Counted repetitions are expanded, so a short pattern may need many instructions."""
_MAX_NESTING: Final = 50

_PLAIN: Final = re.compile(rf"[\w.]{{0,{MAX_PATTERN_LENGTH // 2}}}")
_COUNT: Final = re.compile(r"\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP_KIND: Final = re.compile(r"P<\w+>|(?P<look><?[=!])")
_CLASS_ESCAPES: Final = "dDsSwW"
_ANCHOR_ESCAPES: Final = "bBAZ"


@dataclass(frozen=True)
class _Character:
    accepts: re.Pattern[str]  # matches one character


@dataclass(frozen=True)
class _Anchor:
    holds: re.Pattern[str]  # matches between two characters, consumes none


@dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    items: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repetition:
    item: _Node
    least: int
    most: int | None


@dataclass(frozen=True)
class _Look:
    body: _Node
    ahead: bool
    wanted: bool


_Node = _Character | _Anchor | _Sequence | _Choice | _Repetition | _Look


@dataclass(frozen=True)
class _Held:
    """Holds at a position if the body of lookaround number `look` matches there, or does not (`wanted`)."""

    look: int
    wanted: bool


class PathPattern:
    """A regular expression; equivalent to re.fullmatch() on a path."""

    def __init__(self, text: str) -> None:
        """Raises ValueError with the reason if the pattern cannot be used."""
        if len(text) > MAX_PATTERN_LENGTH:
            raise ValueError(f"it has {len(text)} characters; accepted: up to {MAX_PATTERN_LENGTH}")
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        self._looks: list[_Program] = []
        self._program = _Program(_Parser(text).parse(), self._looks)

    def matches(self, path: str) -> bool:
        """True if the pattern matches the whole path."""
        held: list[set[int]] = []
        for look in self._looks:
            held.append(look.ends(path, held, begins_anywhere=True))
        return len(path) in self._program.ends(path, held)


class _Program:
    """A node compiled to instructions that threads follow.

    `looks` receives the bodies of lookarounds, inner ones first. A program that runs `backwards` reads the path from
    its last character to its first, so it finds where its matches begin.
    """

    def __init__(self, node: _Node, looks: list[_Program], *, backwards: bool = False) -> None:
        # Each instruction is an atom and the targets after it, or None and targets that threads follow at once.
        self._instructions: list[tuple[_Character | _Anchor | _Held | None, tuple[int, ...]]] = []
        self._looks = looks
        self._backwards = backwards
        self._emit(node)

    def ends(self, path: str, held: Sequence[set[int]], *, begins_anywhere: bool = False) -> set[int]:
        """Returns the end positions of matches that begin at the program's start, or at any position.

        `held` are the end positions of the lookarounds' bodies.
        """
        found: set[int] = set()
        threads: set[int] = set()
        positions = range(len(path) + 1)
        first = len(path) if self._backwards else 0
        for position in reversed(positions) if self._backwards else positions:
            if begins_anywhere or position == first:
                threads.add(0)
            threads = self._closure(threads, path, position, held)
            if len(self._instructions) in threads:
                found.add(position)
            character = path[position - 1 : position] if self._backwards else path[position : position + 1]
            threads = self._advanced(threads, character)
        return found

    def _advanced(self, threads: set[int], character: str) -> set[int]:
        """Moves the threads over a character; none survive at the end of the path."""
        advanced: set[int] = set()
        for thread in threads - {len(self._instructions)}:
            atom, targets = self._instructions[thread]
            if isinstance(atom, _Character) and atom.accepts.fullmatch(character):
                advanced.update(targets)
        return advanced

    def _closure(self, threads: set[int], path: str, position: int, held: Sequence[set[int]]) -> set[int]:
        """Returns the threads and all threads that they reach at this position without consuming a character."""
        reached, pending = set(threads), list(threads)
        while pending:
            thread = pending.pop()
            if thread == len(self._instructions):
                continue
            atom, targets = self._instructions[thread]
            if isinstance(atom, _Character):
                continue
            if isinstance(atom, _Anchor) and not atom.holds.match(path, position):
                continue
            if isinstance(atom, _Held) and (position in held[atom.look]) is not atom.wanted:
                continue
            new = [target for target in targets if target not in reached]
            reached.update(new)
            pending += new
        return reached

    def _emit(self, node: _Node) -> None:
        if isinstance(node, _Sequence):
            for item in reversed(node.items) if self._backwards else node.items:
                self._emit(item)
        elif isinstance(node, _Choice):
            self._emit_choice(node)
        elif isinstance(node, _Repetition):
            self._emit_repetition(node)
        elif isinstance(node, _Look):
            # A lookahead runs backwards: what follows a position is found from the end.
            self._looks.append(_Program(node.body, self._looks, backwards=node.ahead))
            self._append(_Held(len(self._looks) - 1, node.wanted), len(self._instructions) + 1)
        else:
            self._append(node, len(self._instructions) + 1)

    def _emit_choice(self, node: _Choice) -> None:
        fork = self._append(None)
        starts, ends = [], []
        for item in node.items:
            starts.append(len(self._instructions))
            self._emit(item)
            ends.append(self._append(None))
        self._instructions[fork] = (None, tuple(starts))
        for end in ends:
            self._instructions[end] = (None, (len(self._instructions),))

    def _emit_repetition(self, node: _Repetition) -> None:
        for _ in range(node.least):
            before = len(self._instructions)
            self._emit(node.item)
            if len(self._instructions) == before:
                return  # an empty item repeats to nothing; do not count to a billion
        if node.most is None:
            fork = self._append(None)
            self._emit(node.item)
            self._append(None, fork)
            self._instructions[fork] = (None, (fork + 1, len(self._instructions)))
            return
        forks = []
        for _ in range(node.most - node.least):
            forks.append(self._append(None))
            self._emit(node.item)
        for fork in forks:
            self._instructions[fork] = (None, (fork + 1, len(self._instructions)))

    def _append(self, atom: _Character | _Anchor | _Held | None, *targets: int) -> int:
        if len(self._instructions) + sum(len(look._instructions) for look in self._looks) >= MAX_INSTRUCTIONS:
            raise ValueError("its repetitions are too many to be matched in a short time")
        self._instructions.append((atom, targets))
        return len(self._instructions) - 1


class _Parser:
    """Parses a text that `re` accepts. Raises ValueError for features that need backtracking."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._nesting = 0

    def parse(self) -> _Node:
        return self._choice()

    def _choice(self) -> _Node:
        branches = [_Sequence(tuple(self._items()))]
        while self._take("|"):
            branches.append(_Sequence(tuple(self._items())))
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _items(self) -> Iterator[_Node]:
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            yield self._repeated(self._atom())

    def _atom(self) -> _Node:
        character = self._text[self._position]
        if character == "[":
            return self._single(self._text_of_class())
        self._position += 1
        if character == "(":
            return self._group()
        if character in "^$":
            return _Anchor(re.compile(character))
        if character == "\\":
            return self._escape()
        return _Character(re.compile("." if character == "." else re.escape(character)))

    def _group(self) -> _Node:
        look = None
        if self._take("?") and not self._take(":"):
            kind = _GROUP_KIND.match(self._text, self._position)
            if kind is None:
                raise ValueError(
                    f"'(?{self._text[self._position]}' is not supported; accepted: groups (...) and (?:...), and "
                    "lookarounds (?=...), (?!...), (?<=...) and (?<!...)"
                )
            look = kind["look"]
            self._position = kind.end()
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise ValueError(f"groups are nested deeper than {_MAX_NESTING}")
        node = self._choice()
        self._nesting -= 1
        self._take(")")
        return node if look is None else _Look(node, ahead="<" not in look, wanted="=" in look)

    def _escape(self) -> _Node:
        character = self._text[self._position]
        if character.isalnum() and character not in _CLASS_ESCAPES + _ANCHOR_ESCAPES:
            accepted = ", ".join(f"\\{letter}" for letter in _CLASS_ESCAPES + _ANCHOR_ESCAPES)
            raise ValueError(f"'\\{character}' is not supported; accepted: {accepted} and escaped punctuation")
        self._position += 1
        escape = re.compile(f"\\{character}")
        return _Anchor(escape) if character in _ANCHOR_ESCAPES else _Character(escape)

    def _text_of_class(self) -> str:
        match = _CLASS.match(self._text, self._position)
        assert match is not None  # re.compile() has accepted the whole text
        return match[0]

    def _single(self, text: str) -> _Node:
        self._position += len(text)
        return _Character(re.compile(text))

    def _repeated(self, item: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return item
        self._take("?")  # lazy repetition: only the order of trying differs, not the result
        if self._position < len(self._text) and self._text[self._position] == "+":
            raise ValueError("possessive repetition is not supported")
        return _Repetition(item, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _COUNT.match(self._text, self._position)
        # Like `re`, treats {} and other forms as plain characters; _atom() does so too.
        if match is None or not (match["least"] or match["comma"]):
            return None
        self._position = match.end()
        least = int(match["least"] or 0)
        if not match["comma"]:
            return least, least
        return least, int(match["most"]) if match["most"] else None

    def _take(self, character: str) -> bool:
        if not self._text.startswith(character, self._position):
            return False
        self._position += 1
        return True


@lru_cache(maxsize=1024)
def path_pattern(text: str) -> PathPattern:
    """Returns PathPattern(text); caches compiled patterns."""
    return PathPattern(text)


def is_plain(pattern: str) -> bool:
    """True if a pattern is the name of a module, in which only dots are special characters."""
    return _PLAIN.fullmatch(pattern) is not None


def matches_end(pattern: str, path: str) -> bool:
    """True if a plain pattern matches the whole path of a module, or the part after one of its dots."""
    start = len(path) - len(pattern)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    return all(expected in (letter, ".") for expected, letter in zip(pattern, path[start:], strict=True))
