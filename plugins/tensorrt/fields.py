"""A node's attributes as TensorRT's plugin fields: those that a creator requests, and those that a plan stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from ..._core import EngineError
from ..definition import Attribute, Plugin

# Element type and PluginFieldType for each kind of attribute. TensorRT's ONNX parser converts to the requested type.
_FIELD_TYPES: Final[dict[str, tuple[type[np.generic], str]]] = {
    "int": (np.int32, "INT32"),
    "ints": (np.int32, "INT32"),
    "float": (np.float32, "FLOAT32"),
}


class Fields:
    """PluginFields and their PluginFieldCollection, which by itself does not keep the fields alive."""

    def __init__(self, trt: Any, fields: Iterable[Any]) -> None:
        """Stores the fields; each field keeps its array alive."""
        self._fields = list(fields)
        self.collection = trt.PluginFieldCollection(self._fields)


def requested_fields(trt: Any, plugin: Plugin) -> Fields:
    """Fields that tell the parser the names and types of a creator's attributes."""
    return Fields(trt, (_field(trt, attribute, []) for attribute in plugin.own_attributes))


def fields_of(trt: Any, plugin: Plugin, attributes: Mapping[str, Any]) -> Fields:
    """Fields that hold the attributes."""
    return Fields(
        trt,
        (_field(trt, attribute, np.atleast_1d(attributes[attribute.name])) for attribute in plugin.own_attributes),
    )


def attributes_of(trt: Any, plugin: Plugin, fields: Iterable[Any], subject: str) -> dict[str, Any]:
    """The attributes in the fields, with defaults for missing ones.

    Raises EngineError, beginning with `subject`, that lists every field that is missing, unknown or of another type or
    size, and all problems that plugin.check() finds.
    """
    known = {attribute.name: attribute for attribute in plugin.own_attributes}
    values: dict[str, Any] = {}
    problems = []
    for field in fields:
        attribute = known.get(field.name)
        if attribute is None:
            problems.append(f"field {field.name} is not known; its fields are {', '.join(known)}")
        elif field.name in values:
            problems.append(f"field {field.name} is given twice")
        else:
            values[field.name] = attribute.default
            problem = _problem(trt, attribute, field)
            if problem is None:
                values[field.name] = _value(attribute, field)
            else:
                problems.append(problem)
    for attribute in plugin.own_attributes:
        if attribute.name not in values:
            values[attribute.name] = attribute.default
            if attribute.default is None:
                problems.append(f"field {attribute.name} is missing")
    if not problems:
        problems = plugin.check({}, values)
    if problems:
        raise EngineError(f"{subject}: " + "; ".join(problems))
    return values


def _field(trt: Any, attribute: Attribute, values: Any) -> Any:
    dtype, type_name = _FIELD_TYPES[attribute.kind]
    return trt.PluginField(attribute.name, np.asarray(values, dtype), getattr(trt.PluginFieldType, type_name))


def _problem(trt: Any, attribute: Attribute, field: Any) -> str | None:
    """Problem of a field's type or size."""
    dtype, type_name = _FIELD_TYPES[attribute.kind]
    if field.type != getattr(trt.PluginFieldType, type_name):
        return f"field {attribute.name} is {field.type.name}; expected {type_name}"
    size = np.asarray(field.data, dtype).size
    if attribute.kind != "ints" and size != 1:
        return f"field {attribute.name} has {size} elements; expected 1"
    return None


def _value(attribute: Attribute, field: Any) -> Any:
    values = np.asarray(field.data).reshape(-1).tolist()
    return values if attribute.kind == "ints" else values[0]
