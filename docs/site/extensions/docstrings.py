"""Sphinx extension: shows the package's docstrings, which are plain text, and the signatures of its C++ classes.

A line `name: text` in a docstring describes an argument; further lines of it are indented.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

import adaptrt

ARGUMENT = re.compile(r"(\w+(?:, \w+)*): (?=\S)")
# Types as pybind11 writes them, and as Python does.
TYPES = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "collections.abc.": "",
    "adaptrt._core.": "",
    "typing.": "",
}


def to_restructured_text(lines: list[str]) -> list[str]:
    """Returns the lines with arguments as fields, and without what reStructuredText would read as markup."""
    made: list[str] = []
    arguments = False
    for line in lines:
        text = re.sub(r"(`[^`]*`)|([*|\\])", lambda found: f"`{found[1]}`" if found[1] else f"\\{found[2]}", line)
        text = re.sub(r"_\b", r"\\_", text) if text.endswith("_") else text
        argument = ARGUMENT.match(text.strip())
        indent = len(text) - len(text.lstrip())
        if argument and (arguments or not made or not made[-1].strip()):
            arguments = True
            text = f":param {argument[1]}: {text.strip()[argument.end() :]}"
        elif arguments and text.strip() and indent > 0:
            text = "    " + text.strip()
        elif arguments and text.strip():
            arguments = False
            made.append("")
        made.append(text)
    return made


def process_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Replaces the lines of a docstring."""
    if what != "module":
        lines[:] = to_restructured_text(lines)


def process_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Shortens the types of C++ signatures."""

    def shortened(text: str | None) -> str | None:
        for long, short in TYPES.items():
            text = text and text.replace(long, short)
        return text and re.sub(r"\(self: \w+(, )?", "(", text)

    return shortened(signature), shortened(returns)


def skip_member(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out classes of the package that are also an attribute of another class."""
    return True if what == "class" and isinstance(value, type) and name in adaptrt.__all__ else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this when it loads the extension."""
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True}
