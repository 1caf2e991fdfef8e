"""Writes adaptrt/_core.pyi from the built extension module's own signatures.

    python cpp/bindings/stub/make_stub.py > cpp/bindings/adaptrt/_core.pyi

A test compares the two, so run this again after each change of a binding.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_HEADER = """\
# Made by cpp/bindings/stub/make_stub.py; do not edit.
# ruff: noqa
# fmt: off
import builtins
import collections.abc
import datetime
import enum
import typing

import numpy
import numpy.typing
import typing_extensions

from .runtime.options.speculative import DecodingConfig, ExternalDraftTokensConfig, LookaheadDecodingConfig

"""
_OPENING, _CLOSING = "([{<", ")]}>"
# What pybind11 and object define themselves, or what a type checker has no use for.
_HIDDEN = {"__getstate__", "__setstate__", "__hash__", "__repr__", "__eq__", "__doc__", "__module__", "__new__"}


def make_stub(module: ModuleType) -> str:
    """The text of the module's stub file."""
    lines = [
        f"{name}: {type(value).__name__}"
        for name, value in sorted(vars(module).items())
        if isinstance(value, (int, float))
    ]
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    for name, value in _bases_first(classes):
        lines += _class(name, value, module.__name__)
    for name, value in sorted(vars(module).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            lines += _function(name, value.__doc__ or "", module.__name__, indent="")
    return _HEADER + "\n".join(lines) + "\n"


def _bases_first(classes: dict[str, type]) -> Iterator[tuple[str, type]]:
    yield from sorted(classes.items(), key=lambda item: (len(item[1].__mro__), item[0]))


def _class(name: str, cls: type, module: str) -> list[str]:
    base = cls.__base__
    if issubclass(cls, enum.Enum):
        members = [f"    {member.name} = {member.value!r}" for member in cls]
        return [f"class {name}(enum.Enum):", *members, ""]
    bases = "" if base is None or base.__name__ in ("object", "pybind11_object") else f"({base.__name__})"
    body: list[str] = []
    for attribute, value in sorted(vars(cls).items(), key=lambda item: (item[0] != "__init__", item[0])):
        if attribute in _HIDDEN or attribute.startswith("_pybind11"):
            continue
        if isinstance(value, str):
            body.append(f"    {attribute}: str")
        elif isinstance(value, type):
            body += [f"    {line}".rstrip() for line in _class(attribute, value, module)]
        elif isinstance(value, property):
            body += _property(attribute, value, module)
        elif isinstance(value, type):
            body.append(f"    {attribute}: typing.Any")  # a class of the module by another name
        elif callable(value):
            if isinstance(value, staticmethod):
                body.append("    @staticmethod")
                value = value.__func__
            body += _function(attribute, value.__doc__ or "", module, indent="    ")
        elif isinstance(value, str) and not attribute.startswith("__"):
            body.append(f"    {attribute}: typing.Final = {value!r}")
    return [f"class {name}{bases}:", *body, ""] if body else [f"class {name}{bases}: ...", ""]


def _property(name: str, value: property, module: str) -> list[str]:
    getter = _signatures(getattr(value.fget, "__doc__", None) or "", module)
    kind = getter[0][1] if getter else "typing.Any"
    lines = ["    @property", f"    def {name}(self) -> {kind}: ..."]
    if value.fset is not None:
        setter = _signatures(value.fset.__doc__ or "", module)
        accepted = setter[0][0][-1].partition(": ")[2] if setter else kind
        lines += [f"    @{name}.setter", f"    def {name}(self, value: {accepted}) -> None: ..."]
    return lines


def _function(name: str, doc: str, module: str, indent: str) -> list[str]:
    signatures = _signatures(doc, module)
    lines = []
    for parameters, result in signatures:
        if name == "__enter__":
            result = "typing_extensions.Self"
        if len(signatures) > 1:
            lines.append(f"{indent}@typing.overload")
        lines.append(f"{indent}def {name}({', '.join(parameters)}) -> {result}: ...")
    return lines


def _signatures(doc: str, module: str) -> list[tuple[list[str], str]]:
    """(parameters, result) of each overload, from the lines that pybind11 puts into a docstring."""
    found = []
    for line in doc.splitlines():
        match = re.match(r"(?:\d+\. )?\w*(\(.*) -> (.+)$", line)
        if match is None or (found and not re.match(r"\d+\. ", line)):
            continue
        inside = match[1][1 : match[1].rindex(")")]
        parameters = [_parameter(text, module) for text in _split(inside, ", ")]
        found.append((parameters, _type(match[2], module)))
    return found


def _parameter(text: str, module: str) -> str:
    declaration, *default = _split(text, " = ", most=1)
    name, _, kind = declaration.partition(": ")
    if name == "self":
        return name
    if not kind:
        return f"{name}: typing.Any" if name.startswith("*") and len(name) > 1 else name
    return f"{name}: {_type(kind, module)}" + (" = ..." if default else "")


def _type(text: str, module: str) -> str:
    for written, meant in (
        (f"{module}.", ""),
        ("adaptrt::", ""),  # a class that is bound after the function
        # For Python 3.10, NumPy does not declare its arrays as buffers.
        ("typing_extensions.Buffer", "typing_extensions.Buffer | numpy.typing.NDArray[typing.Any]"),
        ("typing.SupportsInt | typing.SupportsIndex", "int"),
        ("typing.SupportsFloat | typing.SupportsIndex", "float"),
    ):
        text = text.replace(written, meant)
    text = re.sub(r"\bobject\b", "typing.Any", text).replace("typing.Any | None", "typing.Any")
    # Classes have members of these names.
    text = re.sub(r"(?<![\w.])(list|bytes|dict)\b", r"builtins.\1", text)
    return re.sub(r"builtins\.list\b(?!\[)", "builtins.list[typing.Any]", text)


def _split(text: str, separator: str, most: int | None = None) -> list[str]:
    """Splits where no bracket and no quotation is open."""
    parts, start, depth, quote, i = [], 0, 0, "", 0
    while i < len(text):
        c = text[i]
        if quote:
            quote = "" if c == quote and text[i - 1] != "\\" else quote
        elif c in "'\"":
            quote = c
        elif c in _OPENING:
            depth += 1
        elif c in _CLOSING:
            depth -= 1
        elif depth == 0 and text.startswith(separator, i) and (most is None or len(parts) < most):
            parts.append(text[start:i])
            start = i + len(separator)
            i = start
            continue
        i += 1
    return [part for part in (*parts, text[start:]) if part]


def _main() -> None:
    core: Any = __import__("adaptrt._core", fromlist=["_core"])
    print(make_stub(core), end="")


if __name__ == "__main__":
    _main()
