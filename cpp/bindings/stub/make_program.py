"""Writes the classes of programs in engine files from the fields of their counterparts in adaptrt._core.

    python cpp/bindings/stub/make_program.py MODULE FILE

CMake runs this after it has linked MODULE, and installs FILE next to it as adaptrt/_program.py.

A class has the keywords of its counterpart's constructor, in their order, with two differences: engine files name
tensors and buffers, and they always have the fields that `written_fields` lists, even those with a default.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from make_stub import Parameter, constructor_keywords, docstring_lines, load_module

_TENSORS = {"PanelMatrix": "Matrix", "VectorView": "Vector", "NeuronTable": "NeuronTable"}
"""Classes of adaptrt._core with the bytes of a tensor, and those that name it."""
_ELSEWHERE = dict.fromkeys(("AttentionShape", "DeltaShape", "LatentShape", "ScanShape"), "formats.network.operands")
"""Classes that are written by hand, and their modules."""
_SEQUENCE = re.compile(r"collections\.abc\.Sequence\[(.*)\]")
_HEADER = '''\
# Made by cpp/bindings/stub/make_program.py when the package is built.
# ruff: noqa
# fmt: off
"""Classes of programs in engine files, with the fields of their counterparts in adaptrt._core.

Tensors and buffers are named. None stands for the default of the counterpart's field: no tensor, buffer or adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

'''


def make_program(module: ModuleType) -> str:
    """Returns the text of the file."""
    return _Program(module).text()


class _Program:
    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._imports: dict[str, set[str]] = {"formats.engine.program_tensors": {"BufferName"}}
        self._classes: dict[str, list[str]] = {}
        """Source lines of each class, after those that it uses."""
        self._ops: list[str] = []

    def text(self) -> str:
        self._add("Program")
        lines = [f"from .{origin} import {', '.join(sorted(names))}" for origin, names in sorted(self._imports.items())]
        # formats/engine/plan.py has a Program of its own.
        public = {"Op", *self._imports["formats.engine.program_tensors"], *self._classes} - {"Program"}
        lines += ["", f"__all__ = {sorted(public)}", ""]
        for name, source in self._classes.items():
            if name == "Program":
                lines += ["", f"Op = {' | '.join(self._ops)}", ""]
            lines += ["", *source, ""]
        return _HEADER + "\n".join(lines)

    def _add(self, name: str) -> None:
        """Adds a class and those that it uses."""
        if name in self._classes or name in _TENSORS:
            return
        cls = getattr(self._module, name)
        if name in _ELSEWHERE or issubclass(cls, enum.Enum):
            self._imports.setdefault(_ELSEWHERE.get(name, "_core"), set()).add(name)
            return
        fields: list[str] = []
        for parameter in constructor_keywords(self._module, cls):
            for used in self._used_classes(parameter.type):
                self._add(used)
            fields += self._field(cls, parameter)
        self._classes[name] = [
            "@dataclass(frozen=True, kw_only=True)",
            f"class {name}:",
            *(f"    {line}".rstrip() for line in [*docstring_lines(cls.__doc__ or ""), *fields]),
        ]

    def _used_classes(self, kind: str) -> Iterator[str]:
        yield from (name for name in re.findall(r"\w+", kind) if isinstance(getattr(self._module, name, None), type))

    def _field(self, cls: type, parameter: Parameter) -> list[str]:
        name, default = parameter.name, parameter.default
        kind, is_nullable = self._type(parameter.type, is_buffer=name in cls.buffer_fields)
        if is_nullable and default is not None:
            kind, default = f"{kind} | None", "None"
        has_default = default is not None and name not in cls.written_fields
        value = {"[]": "()"}.get(default, default)
        declaration = f"{name}: {kind} = {value}" if has_default else f"{name}: {kind}"
        return [declaration, *docstring_lines(getattr(cls, name).__doc__ or "")]

    def _type(self, kind: str, *, is_buffer: bool) -> tuple[str, bool]:
        """Returns the type of a field in files, and whether None can stand for its default."""
        sequence = _SEQUENCE.fullmatch(kind)
        if sequence is not None:
            return f"tuple[{self._type(sequence[1], is_buffer=is_buffer)[0]}, ...]", False
        if is_buffer:
            return "BufferName", True
        if " | " in kind:
            self._ops = kind.split(" | ")
            return "Op", False
        if kind in _TENSORS:
            self._imports["formats.engine.program_tensors"].add(_TENSORS[kind])
            return _TENSORS[kind], True
        return kind, kind in self._classes


def _main() -> None:
    module, file = map(Path, sys.argv[1:])
    file.write_text(make_program(load_module(module)), encoding="utf-8")


if __name__ == "__main__":
    _main()
