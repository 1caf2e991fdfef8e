"""The format of function calls in a model's answers: its parser and its grammar."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from .reader import Steps, TextReader
from .sink import PartSink

Parameters: TypeAlias = Mapping[str, Any]
"""JSON schema of a function's arguments."""


class Functions(dict[str, "Parameters | None"]):
    """Functions that an answer may call: parameters by name; None: the function takes none."""

    def __init__(self, functions: Mapping[str, Parameters | None]) -> None:
        super().__init__(functions)
        self.longest: Final = max(map(len, functions), default=0)
        """Number of characters of the longest name."""


@dataclass(frozen=True)
class CallRule:
    """A function as a grammar's rules see it."""

    name: str
    """Name of the function."""
    schema: str
    """JSON schema of its arguments, for %json."""
    parameters: Parameters | None
    """The same schema without options; None: any arguments."""
    options: Mapping[str, Any]
    """llguidance's options in the schema."""
    place: str
    """Location in the request, for errors."""


@dataclass(frozen=True)
class CallGrammar:
    """A grammar in llguidance's Lark for one or more calls."""

    marker: str
    """Text before the calls; "": they need none, so an answer is either calls or text."""
    body: str
    """Expression of what follows the marker."""
    rules: Sequence[str] = field(default_factory=list)
    """Further rules that the expression needs."""
    between: str = ""
    """Regular expression between a body and the next marker."""
    repeats: bool = True
    """True: further bodies may follow, each after its own marker. False: one body has all calls."""
    is_marker_optional: bool = False
    is_text_apart: bool = False
    """True: an answer is calls or text, not both."""
    text: str = r"(.|\n)*"
    """Regular expression of an answer without calls."""


class CallForm(ABC):
    """Format in which a model writes calls."""

    marks: tuple[str, ...] = ()
    """Texts that the parser must see even if they are special tokens, which answers leave out."""

    @abstractmethod
    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """Parses text and calls up to the end of the answer.

        Text that looks like a call stays text if it names an unknown function. A call begins when its name is known.
        """

    @abstractmethod
    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """Returns the grammar of calls. is_single: there is only one. token: writes a marker, which may be a special
        token. Raises ApiError for parameters that this format cannot enforce.
        """


def literal(text: str) -> str:
    """Returns a text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False)


def rule_until(name: str, mark: str, token: Callable[[str], str]) -> list[str]:
    """Returns rules in Lark of which `name` is any text and the mark after it. token: writes the mark."""
    written = token(mark)
    if written == literal(mark):
        return [rf"{name}[suffix={written}]: /(.|\n)*/"]
    return [rf"{name}: {name.upper()} {written}", rf"{name.upper()}: /(.|\n)*/"]


def ordered_rules(prefix: str, items: Sequence[str], required: Sequence[bool]) -> list[str]:
    """Returns rules in Lark of which `prefix` is all items in their order, with COMMA between two of them.

    Items that are not required may be missing.
    """

    def followers(first: int) -> list[str]:
        """Rules of the items that may come next; "": none is needed."""
        rules = []
        for i in range(first, len(items)):
            rules.append(f"{prefix}_{i}")
            if required[i]:
                return rules
        return [*rules, ""]

    empty = '""'
    rules = [f"{prefix}: {' | '.join(one or empty for one in followers(0))}"]
    for i, item in enumerate(items):
        rules.append(f"{prefix}_{i}: {item} {prefix}_after_{i}")
        more = " | ".join(f"COMMA {one}" if one else empty for one in followers(i + 1))
        rules.append(f"{prefix}_after_{i}: {more}")
    return rules
