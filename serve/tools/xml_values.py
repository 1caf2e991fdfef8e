"""Arguments between tags. They have no types, so the function's schema decides: a string is written as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...runtime.guided_decoding import with_json_options
from ..errors import ApiError
from .form import CallRule, Parameters, literal
from .reader import SPACE, Emit, Marks, Steps, TextReader

_ALL: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
"""Templates write these values in Python's way."""
_MAX_NESTED: Final = 16
"""Maximum number of schemas inside each other that are searched for types."""
_MAX_SPACE: Final = 64
"""Maximum number of characters between two tags."""
_HARMLESS: Final = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})
"""Keys of an argument's schema that a grammar of tags need not enforce."""
_OPEN: Final = (
    "patternProperties", "unevaluatedProperties", "propertyNames", "dependentRequired", "dependentSchemas", "$ref",
    "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "if", "const", "enum",
)  # fmt: skip
"""Keys of a function's parameters that a grammar of tags cannot enforce."""


def types_of(parameters: Parameters | None, name: str) -> frozenset[str]:
    """Returns the JSON types that an argument may have."""
    root = parameters or {}
    properties = root.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], root, 0)
    return _types(root.get("additionalProperties", True), root, 0)


def _types(schema: Any, root: Parameters, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED:
        return _ALL
    found = _ALL
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= {kind}
    elif isinstance(kind, list):
        found &= {item for item in kind if isinstance(item, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= {name for value in values for name in _types_of_value(value)}
    if isinstance(schema.get("$ref"), str):
        found &= _types(_resolved(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= {name for inner in schema[key] for name in _types(inner, root, depth + 1)}
    for inner in schema.get("allOf") or ():
        found &= _types(inner, root, depth + 1)
    return found or _ALL


def _resolved(reference: str, root: Parameters) -> Any:
    """Returns the schema of a reference such as #/$defs/name; None: it is elsewhere."""
    at: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(at, Mapping):
            return None
        at = at.get(key.replace("~1", "/").replace("~0", "~"))
    return at if reference.startswith("#") else None


def _types_of_value(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    if isinstance(value, float):
        return ("number", "integer") if value.is_integer() else ("number",)
    return ({str: "string", list: "array", dict: "object", type(None): "null"}[type(value)],)


def json_of(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of an argument that may be more than a string.

    The text is JSON if it is of one of the types, or a string. If neither fits, it is JSON if it can be.
    """
    stripped = text.strip()
    if stripped in _PYTHON and "string" not in types:
        stripped = _PYTHON[stripped]
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not types & set(_types_of_value(value)):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_argument(
    reader: TextReader, emit: Emit, types: frozenset[str], ends: Marks, followers: Sequence[str]
) -> Steps[bool]:
    """Reads an argument up to its end tag, and emits its JSON text: a string as it arrives, other values at their end.

    ends: spellings of the end tag. It ends the argument if one of `followers` or the answer's end follows, so that
    arguments may contain such tags. Returns False if the answer ends before.
    """
    if types != {"string"}:
        held: list[str] = []
        is_whole = yield from _read_until_end(reader, held.append, ends, followers)
        if is_whole:
            emit(json_of("".join(held), types))
        return is_whole
    emit('"')
    is_whole = yield from _read_until_end(
        reader, lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]), ends, followers
    )
    if is_whole:
        emit('"')
    return is_whole


def _read_until_end(reader: TextReader, emit: Emit, ends: Marks, followers: Sequence[str]) -> Steps[bool]:
    while end := (yield from reader.until(ends, emit)):
        is_end = yield from _is_followed(reader, len(end), followers)
        text = reader.take(len(end))
        if is_end:
            return True
        emit(text)
    return False


def _is_followed(reader: TextReader, num_before: int, followers: Sequence[str]) -> Steps[bool]:
    for length in range(num_before + 1, num_before + _MAX_SPACE):
        text = yield from reader.ahead(length)
        rest = text[num_before:].lstrip(SPACE)
        if any(rest.startswith(follower) for follower in followers):
            return True
        if not any(follower.startswith(rest) for follower in followers):
            return False
        if len(text) < length:
            return True
    return False


@dataclass(frozen=True)
class Tags:
    """Tags around arguments, as expressions in Lark."""

    before_name: str
    any_name: str
    """Regular expression of a name."""
    after_name: str
    text: str
    """Definition of a rule `argument_text`: any text and the tag after it."""
    end: str
    """The tag after an argument."""


def argument_rules(index: int, call: CallRule, tags: Tags) -> tuple[str, list[str]]:
    """Returns an expression in Lark for the arguments of a call, and its rules. It also needs the rule of `tags.text`.

    Arguments are in the order of the schema. Raises ApiError for a schema that tags cannot enforce.
    """
    any_argument = f"({tags.before_name} {tags.any_name} {tags.after_name} argument_text)*"
    if call.parameters is None:
        return any_argument, []
    root, is_lenient = call.parameters, bool(call.options.get("lenient"))
    properties = root.get("properties") or {}
    if not is_lenient:
        for key in _OPEN:
            if key in root:
                raise _not_enforced(call, key)
        if root.get("additionalProperties", True) is not False:
            raise _not_enforced(call, "additionalProperties")
    required = root.get("required") or ()
    arguments, rules = [], []
    for i, (name, schema) in enumerate(properties.items()):
        rule = f"argument_{index}_{i}"
        value = _value_rule(call, name, schema, tags, is_lenient)
        rules.append(f"{rule}: {tags.before_name} {literal(name)} {tags.after_name} {value}")
        arguments.append(rule if name in required else f"{rule}?")
    if root.get("additionalProperties", True) is not False:
        arguments.append(any_argument)
    return " ".join(arguments), rules


def _value_rule(call: CallRule, name: str, schema: Any, tags: Tags, is_lenient: bool) -> str:
    root = call.parameters or {}
    types = _types(schema, root, 0)
    if "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {with_json_options(json.dumps({**schema, **shared}), call.options)} {tags.end}"
    plain = schema if isinstance(schema, Mapping) else {}
    values = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if isinstance(values, list):
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"({' | '.join(map(literal, written))}) {tags.end}"
    if not is_lenient and (key := _constraint(schema)):
        raise _not_enforced(call, f"properties.{name}.{key}")
    return "argument_text"


def _constraint(schema: Any) -> str | None:
    """Returns a key of a schema that restricts more than the type."""
    if not isinstance(schema, Mapping):
        return None
    for key, value in schema.items():
        if key in ("anyOf", "oneOf") and isinstance(value, list):
            if any(_constraint(inner) for inner in value):
                return str(key)
        elif key not in _HARMLESS:
            return str(key)
    return None


def _not_enforced(call: CallRule, field: str) -> ApiError:
    param = f"{call.place}.parameters.{field}"
    return ApiError(
        f"{param} of '{call.name}' cannot be enforced, because the model writes arguments between tags; expected "
        "parameters without it, or strict false",
        param=param,
    )
