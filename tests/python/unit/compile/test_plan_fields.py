"""Each class of a program in an engine file has the fields of its counterpart in adaptrt._core, of the same types.

Most of these classes are made when the package is built; Quantization and the shapes of layers are written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import xxhash

from adaptrt import _core, _program
from adaptrt.formats.engine import plan
from adaptrt.formats.engine.engine_file import FORMAT_VERSION
from adaptrt.formats.engine.plan_json import NAMES_IN_FILES
from adaptrt.formats.network.operands import AttentionShape, DeltaShape, LatentShape, ScanShape

# These types name a tensor of the engine file where the core's type holds its bytes.
TENSORS = {plan.Matrix: "PanelMatrix", plan.Vector: "VectorView", plan.NeuronTable: "NeuronTable"}
MADE = [
    kind for _, kind in inspect.getmembers(_program, dataclasses.is_dataclass) if kind.__module__ == _program.__name__
]
CLASSES = [*MADE, plan.Quantization, AttentionShape, DeltaShape, LatentShape, ScanShape]
MAKERS = Path(__file__).parents[4] / "cpp" / "bindings" / "stub"
REQUIRED_FIELDS = {9: "a0067643e0aa24de"}
"""Digest of the fields that every engine file of a format version has, if it has their class."""


class Keyword(typing.NamedTuple):
    """A keyword of a constructor, as source text."""

    type: str
    default: str | None


def _constructors() -> dict[str, dict[str, Keyword]]:
    """Returns the keywords of each class's constructors, from the generated stub of the module."""
    stub = ast.parse((Path(_core.__file__ or "").parent / "_core.pyi").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Keyword]] = {}
    for node in stub.body:
        if not isinstance(node, ast.ClassDef):
            continue
        keywords = found[node.name] = {}
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
                    assert argument.annotation is not None
                    text = None if default is None else ast.unparse(default)
                    keywords[argument.arg] = Keyword(ast.unparse(argument.annotation), text)
    return found


CONSTRUCTORS = _constructors()


def _type_in_core(hint: Any) -> str:
    """Returns the type of a field's counterpart, as the stub writes it."""
    if hint is plan.BufferName:
        return "int"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        return " | ".join(sorted(_type_in_core(choice) for choice in choices))
    if typing.get_origin(hint) is tuple:
        return f"collections.abc.Sequence[{_type_in_core(typing.get_args(hint)[0])}]"
    return TENSORS.get(hint, hint.__name__)


def _sorted_union(text: str) -> str:
    head, opening, inside = text.rpartition("[")
    names = " | ".join(sorted(inside.removesuffix("]").split(" | ")))
    return f"{head}[{names}]" if opening else names


def test_every_class_has_a_counterpart() -> None:
    assert {kind.__name__ for kind in CLASSES} <= set(CONSTRUCTORS)
    assert {f"{name}Op" for name in ("Linear", "Attention", "Embedding")} <= {kind.__name__ for kind in CLASSES}
    ops = {name for name in CONSTRUCTORS if name.endswith("Op")}
    assert {kind.__name__ for kind in plan.OP_NAMES.values()} == ops
    assert plan.Program.__mro__[1] in MADE


def test_the_classes_are_those_of_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MAKERS))
    made = importlib.import_module("make_program").make_program(_core)
    assert made == Path(_program.__file__).read_text(encoding="utf-8")


def test_every_engine_file_of_a_version_has_the_same_fields() -> None:
    """A new field needs a default; otherwise existing engines could not be read."""
    required = {
        kind.__name__: [
            NAMES_IN_FILES.get(field.name, field.name)
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING
        ]
        for kind in CLASSES
    }
    text = json.dumps(required, sort_keys=True)
    assert xxhash.xxh3_64_hexdigest(text.encode()) == REQUIRED_FIELDS[FORMAT_VERSION], text


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_fields_are_those_of_the_counterpart(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    assert {name: _type_in_core(hint) for name, hint in hints.items()} == {
        name: _sorted_union(keyword.type) for name, keyword in CONSTRUCTORS[kind.__name__].items()
    }


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_default_is_the_counterparts_too(kind: type) -> None:
    """Engine files leave out fields that have their default; the engine then uses its constructor's default."""
    defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    for name, default in defaults.items():
        made = CONSTRUCTORS[kind.__name__][name].default
        assert made is not None, name
        if default is None:
            continue  # left to the constructor
        text = str(default) if isinstance(default, enum.Enum) else repr(list(default) if default == () else default)
        assert made == text, name
