"""Faults for a source file: small changes of single tokens or statements."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

# Formatters put spaces only around binary operators, not around other uses of the same characters.
SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
    " + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", " // ": " * ", " % ": " / ",
    " += ": " -= ", " -= ": " += ", "min": "max", "max": "min",
}  # fmt: skip
CPP_SWAPS = {" && ": " || ", " || ": " && ", "true": "false", "false": "true", "++": "--", "--": "++", "!": ""}
PYTHON_SWAPS = {
    " and ": " or ", " or ": " and ", "True": "False", "False": "True", "not ": "",
    " is None": " is not None", " is not None": " is None",
}  # fmt: skip
ARITHMETIC = {" + ", " - ", " * ", " / "}

_OPERATORS = r" (?:[<>=!+\-]=|//|[<>+\-*/%]) |\b(?:min|max)(?=<|\([^)])"
_CPP_TOKENS = re.compile(_OPERATORS + r"| (?:&&|\|\|) |\b(?:true|false)\b|\+\+|--|!(?=[\w(*])")
_PYTHON_TOKENS = re.compile(_OPERATORS + r"| (?:and|or) |\b(?:True|False)\b| is (?:not )?None\b|(?<!is )\bnot (?!in\b)")
_INTEGER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")

_CPP_STATEMENT = re.compile(
    r"[\w:.\[\]>*-]+\(.*\);"  # A call.
    r"|[\w.\[\]>*-]+ [+|-]?= .*;"  # An assignment to an existing variable.
    r"|if \(.*\) (?:return|throw)\b.*;|(?:if \(.*\) )?(?:return|continue|break);"
)
_PYTHON_STATEMENT = re.compile(
    r"[\w.\[\]]+\(.*\)"
    r"|(?:[\w.]+\[.*\]|\w[\w.]*\.\w+) = .*|[\w.\[\]]+ [+|-]= .*"
    r"|raise\b.*|continue|break"
)
# Lines without faults. Only the type checker can see a changed option of @dataclass; no test can.
_NO_CODE = re.compile(r"#|static_assert|using |template|namespace|(?:from \S+ )?import |@(?:dataclasses\.)?dataclass\(")


@dataclass(frozen=True, order=True)
class Fault:
    """Replaces `old` in a line of a file with `new`. Lines count from 1, columns from 0."""

    path: str
    line: int
    column: int
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The file's text with the fault."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1]
        end = self.column + len(self.old)
        if line[self.column : end] != self.old:
            raise ValueError(f"{self.path}:{self.line} has no {self.old!r} at {self.column}")
        lines[self.line - 1] = line[: self.column] + self.new + line[end:]
        return "".join(lines)

    def shown_in(self, text: str) -> str:
        """The line before and after, for display."""
        before = text.splitlines()[self.line - 1].strip()
        after = self.applied_to(text).splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}\n    - {before}\n    + {after}"


def find_faults(path: str, text: str) -> Iterator[Fault]:
    """All faults of a C++ or Python file."""
    is_python = PurePosixPath(path).suffix == ".py"
    code = _python_code(text) if is_python else _cpp_code(text)
    tokens, statement = (_PYTHON_TOKENS, _PYTHON_STATEMENT) if is_python else (_CPP_TOKENS, _CPP_STATEMENT)
    swaps = SWAPS | (PYTHON_SWAPS if is_python else CPP_SWAPS)
    for number, line in enumerate(code.splitlines(), 1):
        stripped = line.strip()
        if not stripped or _NO_CODE.match(stripped):
            continue
        for found in tokens.finditer(line):
            # Strings can be added too, but not subtracted. Programs don't use what repr() shows.
            if not (found[0] in ARITHMETIC and '"' in line) and not line[: found.start()].endswith("(repr="):
                yield Fault(path, number, found.start(), found[0], swaps[found[0]])
        for found in _INTEGER.finditer(line):
            yield Fault(path, number, found.start(), found[0], str(int(found[0]) + 1))
        if statement.fullmatch(stripped) and _is_balanced(stripped):
            column = line.index(stripped)
            old = text.splitlines()[number - 1][column:].rstrip()
            yield Fault(path, number, column, old, "pass" if is_python else ";")


def _is_balanced(code: str) -> bool:
    return all(code.count(opening) == code.count(closing) for opening, closing in ("()", "[]", "{}"))


def _blank(match: re.Match[str]) -> str:
    """Blanks of the match's length; strings keep their quotes."""
    found = match[0]
    quote = found[0]
    if quote in "\"'":
        return quote + "_" * (len(found) - 2) + quote
    return re.sub(r"[^\n]", " ", found)


def _cpp_code(text: str) -> str:
    """The text with comments and strings' contents blanked, everything else at its position."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])\'', _blank, text, flags=re.DOTALL)


def _python_code(text: str) -> str:
    lines = [list(line) for line in text.splitlines(keepends=True)]

    def fill(begin: tuple[int, int], end: tuple[int, int], filling: Callable[[str], str]) -> None:
        for row in range(begin[0], end[0] + 1):
            line = lines[row - 1]
            first = begin[1] if row == begin[0] else 0
            last = end[1] if row == end[0] else len(line)
            for column in range(first, last):
                if line[column] != "\n":
                    line[column] = filling(line[column])

    started: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            fill(token.start, token.end, lambda _: " ")
        elif kind == "STRING":
            fill(token.start, token.end, lambda _: '"')
        elif kind == "FSTRING_START":
            started.append(token.start)
        elif kind == "FSTRING_END":
            fill(started.pop(), token.end, lambda _: '"')
    return "".join("".join(line) for line in lines)
