"""Writes the stub of adaptrt._core from the built module's own signatures, docstrings and defaults.

    python cpp/bindings/stub/make_stub.py MODULE STUB

CMake runs this after it has linked MODULE, and installs STUB next to it. It needs no package but the standard library:
pip builds the module in an environment that has no others.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_HEADER = """\
# Made by cpp/bindings/stub/make_stub.py when the package is built.
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
# Names that pybind11 or object define, and names that a type checker does not need.
_HIDDEN = {"__getstate__", "__setstate__", "__hash__", "__repr__", "__eq__", "__doc__", "__module__", "__new__"}


_MODULE_NAME = "adaptrt._core"


def make_stub(module: ModuleType) -> str:
    """Returns the text of the module's stub file."""
    return _Stub(module).text()


class Parameter(NamedTuple):
    """A parameter of a function, as source text."""

    name: str
    type: str
    default: str | None


def constructor_keywords(module: ModuleType, cls: type) -> list[Parameter]:
    """Returns the keywords of the constructor of a class that has keywords only."""
    (parameters,) = (s.parameters for s in _Stub(module).signatures(cls.__init__.__doc__ or "") if "*" in s.parameters)
    found = []
    for text in parameters[parameters.index("*") + 1 :]:
        declaration, *default = _split(text, " = ", most=1)
        name, _, kind = declaration.partition(": ")
        found.append(Parameter(name, kind, default[0] if default else None))
    return found


class _Stub:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def text(self) -> str:
        names = sorted(vars(self._module).items())
        lines = [f"{name}: {type(value).__name__}" for name, value in names if isinstance(value, (int, float))]
        for name, value in _bases_first({name: value for name, value in names if isinstance(value, type)}):
            lines += self._class(name, value)
        for name, value in names:
            if callable(value) and not isinstance(value, type) and not name.startswith("_"):
                lines += self._function(name, value.__doc__ or "")
        return _HEADER + "\n".join(lines) + "\n"

    def _class(self, name: str, cls: type) -> list[str]:
        base = cls.__base__
        doc = docstring_lines(cls.__doc__ or "")
        if issubclass(cls, enum.Enum):
            members: list[str] = []
            for member in cls:
                members.append(f"{member.name} = {member.value!r}")
                members += docstring_lines(member.__doc__ or "") if member.__doc__ != cls.__doc__ else []
            return [f"class {name}(enum.Enum):", *_indented([*doc, *members]), ""]
        bases = "" if base is None or base.__name__ in ("object", "pybind11_object") else f"({base.__name__})"
        body: list[str] = []
        for attribute, value in sorted(vars(cls).items(), key=lambda item: (item[0] != "__init__", item[0])):
            if attribute in _HIDDEN or attribute.startswith("_pybind11"):
                continue
            if isinstance(value, str):
                body.append(f"{attribute}: str")
            elif isinstance(value, tuple):
                body.append(f"{attribute}: typing.ClassVar[tuple[str, ...]]")
            elif isinstance(value, type):
                body += self._class(attribute, value)
            elif isinstance(value, property):
                body += self._property(attribute, value)
            elif isinstance(value, staticmethod):
                body += self._function(attribute, value.__func__.__doc__ or "", decorator="@staticmethod")
            elif callable(value):
                body += self._function(attribute, value.__doc__ or "")
        return [f"class {name}{bases}:", *_indented([*doc, *body] or ["..."]), ""]

    def _property(self, name: str, value: property) -> list[str]:
        getter = self.signatures(getattr(value.fget, "__doc__", None) or "")
        kind = getter[0].result if getter else "typing.Any"
        lines = ["@property", *_definition(f"def {name}(self) -> {kind}", value.__doc__ or "")]
        if value.fset is not None:
            setter = self.signatures(value.fset.__doc__ or "")
            accepted = setter[0].parameters[-1].partition(": ")[2] if setter else kind
            lines += [f"@{name}.setter", f"def {name}(self, value: {accepted}) -> None: ..."]
        return lines

    def _function(self, name: str, doc: str, decorator: str = "") -> list[str]:
        signatures = self.signatures(doc)
        lines: list[str] = []
        for signature in signatures:
            result = "typing_extensions.Self" if name == "__enter__" else signature.result
            lines += ["@typing.overload"] if len(signatures) > 1 else []
            lines += [decorator] if decorator else []
            lines += _definition(f"def {name}({', '.join(signature.parameters)}) -> {result}", signature.doc)
        return lines

    def signatures(self, doc: str) -> list[_Signature]:
        """Returns the signature of each overload, from the docstring that pybind11 makes."""
        found: list[_Signature] = []
        for line in doc.splitlines():
            match = re.match(r"(?:\d+\. )?\w*(\(.*) -> (.+)$", line)
            if match is None or (found and not re.match(r"\d+\. ", line)):
                if found:
                    found[-1].doc += line + "\n"
                continue
            inside = match[1][1 : match[1].rindex(")")]
            parameters = [self._parameter(text) for text in _split(inside, ", ")]
            found.append(_Signature(parameters, self._type(match[2])))
        return found

    def _parameter(self, text: str) -> str:
        declaration, *default = _split(text, " = ", most=1)
        name, _, kind = declaration.partition(": ")
        if name == "self":
            return name
        if not kind:
            return f"{name}: typing.Any" if name.startswith("*") and len(name) > 1 else name
        return f"{name}: {self._type(kind)}" + "".join(f" = {self._default(value)}" for value in default)

    def _default(self, text: str) -> str:
        """Returns the expression whose repr() pybind11 has written, or "..." where there is none."""
        text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)  # of an enum
        unprinted = re.fullmatch(rf"<{re.escape(self._module.__name__)}\.(\w+) object at 0x[0-9a-f]+>", text)
        name = unprinted[1] if unprinted else text.partition("(")[0]
        if isinstance(getattr(self._module, name, None), type):
            default = self._made_without_arguments(getattr(self._module, name))
            if default is not None and (unprinted or re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", repr(default)) == text):
                return f"{name}()"
        try:
            expression = ast.parse(text, mode="eval")
        except SyntaxError:
            return "..."
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        return text if all(hasattr(self._module, found) or found == "datetime" for found in names) else "..."

    @staticmethod
    def _made_without_arguments(cls: Callable[[], object]) -> object | None:
        try:
            return cls()
        except TypeError:
            return None

    def _type(self, text: str) -> str:
        for written, meant in (
            (f"{self._module.__name__}.", ""),
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


class _Signature:
    """One overload of a function."""

    def __init__(self, parameters: list[str], result: str) -> None:
        self.parameters = parameters
        self.result = result
        self.doc = ""


def _bases_first(classes: dict[str, type]) -> Iterator[tuple[str, type]]:
    yield from sorted(classes.items(), key=lambda item: (len(item[1].__mro__), item[0]))


def _definition(head: str, doc: str) -> list[str]:
    lines = docstring_lines(doc)
    return [f"{head}:", *_indented(lines)] if lines else [f"{head}: ..."]


def docstring_lines(doc: str) -> list[str]:
    """Returns the lines of a docstring, none for an empty one."""
    text = doc.strip().replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    if text.endswith('"'):
        text = text[:-1] + '\\"'
    return f'"""{text}"""'.split("\n") if text else []


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]


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


def load_module(path: Path) -> ModuleType:
    """Returns the module from its file, without the package around it."""
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main() -> None:
    module, stub = map(Path, sys.argv[1:])
    stub.write_text(make_stub(load_module(module)), encoding="utf-8")


if __name__ == "__main__":
    _main()
