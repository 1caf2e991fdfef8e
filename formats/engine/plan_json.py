"""Programs as JSON, strictly: a written program is read back equal, and anything else is refused.

A field with a default is written only if it differs from it, so engines that do not use a new field stay the same.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from ..._core import EngineError
from ...common.json_fields import describe
from .plan import OP_NAMES, Op, Program

_OP_FIELD: Final = "op"
_NAMES_OF_OPS: Final[dict[type, str]] = {kind: name for name, kind in OP_NAMES.items()}
# Sizes and offsets are far below the limits of the C++ structs.
_LARGEST: Final = 1 << 62
NAMES_IN_FILES: Final = {
    "act_order": "reordered",
    "norm_topk_prob": "normalised",
    "num_remote_experts": "experts_elsewhere",
    "num_remote_inputs": "inputs_elsewhere",
    "num_remote_outputs": "outputs_elsewhere",
    "outliers": "exceptions",
    "topk_groups": "groups_taken",
}
"""Names in engine files of fields that are called otherwise elsewhere."""


def program_to_json(program: Program) -> dict[str, Any]:
    """The JSON form of a program."""
    result = _encode(program)
    assert isinstance(result, dict)
    return result


def program_from_json(data: Mapping[str, Any], subject: str) -> Program:
    """Reads what program_to_json() returned.

    Raises EngineError, which begins with `subject` and names every bad field.
    """
    problems: list[str] = []
    program = _decode(Program, data, "program", problems)
    if problems:
        raise EngineError(f"{subject}: " + "; ".join(problems))
    return typing.cast(Program, program)


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        encoded = {
            NAMES_IN_FILES.get(field.name, field.name): _encode(getattr(value, field.name))
            for field in fields(value)
            if _is_required(field) or getattr(value, field.name) != field.default
        }
        name = _NAMES_OF_OPS.get(type(value))
        return encoded if name is None else {_OP_FIELD: name, **encoded}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Returns a value of the annotated type; None after noting a problem."""
    kind = getattr(kind, "__supertype__", kind)  # the type behind a NewType
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _decode_union(kind, value, where, problems)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            return _complain(f"a list of {_name(typing.get_args(kind)[0])}", value, where, problems)
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, entry, f"{where}[{at}]", problems) for at, entry in enumerate(value))
    if is_dataclass(kind):
        return _decode_object(kind, value, where, problems)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        names = {member.name.lower(): member for member in kind}
        if isinstance(value, str) and value in names:
            return names[value]
        return _complain(f"one of {', '.join(names)}", value, where, problems)
    if _is_scalar(kind, value):
        return float(value) if kind is float else value
    return _complain(_name(kind), value, where, problems)


def _decode_union(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    choices = typing.get_args(kind)
    if type(None) in choices:
        (inner,) = (choice for choice in choices if choice is not type(None))
        return None if value is None else _decode(inner, value, where, problems)
    assert kind == Op
    name = value.get(_OP_FIELD) if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in OP_NAMES:
        return _complain(f"an object whose '{_OP_FIELD}' is one of {', '.join(OP_NAMES)}", value, where, problems)
    rest = {key: entry for key, entry in value.items() if key != _OP_FIELD}
    return _decode_object(OP_NAMES[name], rest, where, problems)


def _decode_object(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        return _complain("an object", value, where, problems)
    named = _fields_in_files(kind)
    noted = len(problems)
    problems.extend(f"{where}.{name} is missing" for name in named if named[name].is_required and name not in value)
    problems.extend(f"{where}.{name} is unknown" for name in value if name not in named)
    decoded = {
        field.name: _decode(field.hint, value[name], f"{where}.{name}", problems)
        for name, field in named.items()
        if name in value
    }
    return kind(**decoded) if len(problems) == noted else None


class _FieldInFiles(NamedTuple):
    name: str
    """Name in the class."""
    hint: Any
    is_required: bool


# A program has thousands of objects of a few classes, and hints are evaluated from text.
@cache
def _fields_in_files(kind: type) -> Mapping[str, _FieldInFiles]:
    """Fields of a class by their names in files."""
    hints = typing.get_type_hints(kind)
    return {
        NAMES_IN_FILES.get(field.name, field.name): _FieldInFiles(field.name, hints[field.name], _is_required(field))
        for field in fields(kind)
    }


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING


def _is_scalar(kind: Any, value: Any) -> bool:
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and -_LARGEST < value < _LARGEST
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) < _LARGEST and math.isfinite(value)
    return kind is str and isinstance(value, str)


def _name(kind: Any) -> str:
    kind = getattr(kind, "__supertype__", kind)
    return {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}.get(kind, "objects")


def _complain(wanted: str, value: Any, where: str, problems: list[str]) -> None:
    problems.append(f"{where} is {describe(value)}; expected {wanted}")
