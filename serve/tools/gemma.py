"""Calls of FunctionGemma and Gemma 4: a marker, call:name{key:value,...}, and another marker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...runtime.guided_decoding import with_json_options
from ..errors import ApiError
from .form import CallForm, CallGrammar, CallRule, Functions, literal, ordered_rules, rule_until
from .literals import LiteralStyle, read_literal, read_name
from .reader import SPACE, Marks, Steps, TextReader, drop
from .sink import PartSink

_CALL: Final = "call:"
_HARMLESS: Final = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})
_SCALARS: Final = frozenset({"number", "integer", "boolean", "null"})
_KEYS: Final = {"array": {"items"}, "object": {"properties", "required", "additionalProperties"}, "string": {"enum"}}
"""Keys that the grammar of a type enforces."""


class GemmaForm(CallForm):
    """See the module. Keys have no quotes; strings stand between markers. Text may precede calls."""

    def __init__(self, begin: str, end: str, quote: str) -> None:
        """quote: marker before and after a string."""
        self._begin = begin
        self._end = end
        self._quote = quote
        self._begins = Marks(begin)
        self._style = LiteralStyle((quote,), has_escapes=False, has_bare_keys=True)
        self.marks = (begin, end, quote)

    def read(self, reader: TextReader, sink: PartSink, functions: Functions) -> Steps[None]:
        """See CallForm. The last call may lack its end marker."""
        while (yield from reader.until(self._begins, sink.text)):
            before = reader.take(len(self._begin)) + (yield from reader.take_while(SPACE))
            if not (yield from reader.skip(_CALL)):
                sink.text(before)
                continue
            name = yield from read_name(reader, functions.longest)
            is_call = yield from reader.starts_with("{")
            if not is_call or name not in functions:
                sink.text(f"{before}{_CALL}{name}")
                if is_call:
                    # Markers in the arguments of an unknown function are no calls.
                    yield from reader.until(Marks(self._end), sink.text)
                continue
            sink.begin(name)
            if not (yield from read_literal(reader, sink.arguments, self._style)):
                if reader.ended:
                    # The last characters may be part of a value.
                    yield from reader.rest(drop)
                else:
                    sink.end()
                continue
            sink.end()
            space = yield from reader.take_while(SPACE)
            if not (yield from reader.skip(self._end)):
                sink.text(space)

    def grammar(self, calls: Sequence[CallRule], *, is_single: bool, token: Callable[[str], str]) -> CallGrammar:
        """See CallForm."""
        quote = token(self._quote)
        rules = [
            r"COMMA: /, ?/",
            r"KEY: /[A-Za-z0-9_.+-]+/",
            r"SCALAR: /true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
            f"string: {quote} string_text",
            *rule_until("string_text", self._quote, token),
            'value: string | SCALAR | "[" (value (COMMA value)*)? "]" | object',
            'object: "{" (KEY ":" value (COMMA KEY ":" value)*)? "}"',
        ]
        for i, call in enumerate(calls):
            written = _Rules(call, f"function_{i}", quote)
            body = "object" if call.parameters is None else written.value(call.parameters, "parameters")
            rules += [*written.rules, f"function_{i}: {literal(call.name)} {body}"]
        functions = " | ".join(f"function_{i}" for i in range(len(calls)))
        return CallGrammar(self._begin, f"{literal(_CALL)} ({functions}) {token(self._end)}", rules)


class _Rules:
    """Writes the grammar of values that follow a schema."""

    def __init__(self, call: CallRule, prefix: str, quote: str) -> None:
        self.rules: list[str] = []
        self._call = call
        self._prefix = prefix
        self._quote = quote
        self._is_lenient = bool(call.options.get("lenient"))

    def value(self, schema: Any, place: str) -> str:
        """Returns the expression of a value. Raises ApiError for a schema that the grammar cannot enforce."""
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
        if kinds and kinds <= _SCALARS:
            return f"%json {with_json_options(json.dumps(schema), self._call.options)}"
        if isinstance(schema, Mapping) and (choices := self._choices(schema)):
            return f"({' | '.join(self.value(choice, place) for choice in choices)})"
        if isinstance(schema, Mapping) and not self._is_lenient:
            enforced = _HARMLESS | (_KEYS.get(kind, set()) if isinstance(kind, str) else {"enum"})
            for key in schema:
                if key not in enforced:
                    raise self._refused(f"{place}.{key}")
        if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
            written = [self._scalar(value, place) for value in schema["enum"]]
            return f"({' | '.join(written)})"
        if kind == "string":
            return "string"
        if kind == "array":
            item = self.value(schema.get("items", True), f"{place}.items")
            return f'"[" ({item} (COMMA {item})*)? "]"'
        if kind == "object" and schema.get("properties"):
            return self._object(schema, place)
        return "object" if kind == "object" else "value"

    def _choices(self, schema: Mapping[str, Any]) -> list[Any]:
        """Returns the schemas of which a value follows one; []: the schema is not divided into several."""
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [{**schema, "type": kind} for kind in kinds]
        (key, *others) = [key for key in schema if key not in _HARMLESS] or [""]
        choices = schema[key] if key in ("anyOf", "oneOf") and not others and kinds is None else None
        return choices if isinstance(choices, list) else []

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        if schema.get("additionalProperties", False) is not False and not self._is_lenient:
            raise self._refused(f"{place}.additionalProperties")
        # Templates sort the keys.
        names = sorted(schema["properties"])
        items = []
        for name in names:
            value = self.value(schema["properties"][name], f"{place}.properties.{name}")
            items.append(f"{literal(f'{name}:')} {value}")
        prefix = f"{self._prefix}_object_{len(self.rules)}"
        self.rules += ordered_rules(prefix, items, [name in (schema.get("required") or ()) for name in names])
        return f'"{{" {prefix} "}}"'

    def _scalar(self, value: Any, place: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        if isinstance(value, list | dict):
            raise self._refused(f"{place}.enum")
        return literal(json.dumps(value))

    def _refused(self, field: str) -> ApiError:
        param = f"{self._call.place}.{field}"
        return ApiError(
            f"{param} of '{self._call.name}' cannot be enforced, because the model does not write JSON; expected "
            "parameters without it, or strict false",
            param=param,
        )
