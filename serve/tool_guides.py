"""Writes guides for answers that call functions, in the format that the parsers of tool_calls.py read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .._core import GuidedDecodingParams
from ..runtime.guided_decoding import COMPACT_JSON, with_json_options
from .errors import ApiError
from .tool_calls import HERMES, LLAMA3_JSON

_ANY_OBJECT: Final = {"type": "object"}
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without parameters."""
_OPEN: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)
"""Keys that may allow more argument names. Without them, `properties` lists all names."""


@dataclass(frozen=True)
class GuidedFunction:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """JSON schema of the arguments; None: the function takes none."""
    is_strict: bool
    """True: the arguments must match the schema."""
    place: str
    """Location in the request, for example tools[0].function."""

    def schema(self, *, is_forced: bool) -> str:
        """Returns the JSON schema that the guide enforces for the arguments.

        Raises ApiError if the parameters do not describe an object.
        """
        if not self.is_strict and not is_forced:
            return with_json_options(json.dumps(_ANY_OBJECT), COMPACT_JSON)
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        kind = parameters.get("type", "object")
        if kind != "object":
            field = f"{self.place}.parameters.type"
            raise ApiError(f"{field} of '{self.name}' is {kind!r}; expected 'object'", param=field)
        if "properties" in parameters and not _OPEN & parameters.keys():
            parameters = {**parameters, "additionalProperties": False}
        guidance = COMPACT_JSON if self.is_strict else {**COMPACT_JSON, "lenient": True}
        return with_json_options(json.dumps({"type": "object", **parameters}), guidance)


@dataclass(frozen=True)
class _Form:
    """Format of a call: marker, JSON object, end."""

    marker: str
    needs_marker: bool
    key: str
    """Name of the arguments in the object."""
    end: str
    between: str
    """Regular expression between two calls."""
    text: str
    """Regular expression of an answer without calls."""
    has_text_before: bool
    """True: text may precede a call."""


_FORMS: Final[Mapping[str, _Form]] = {
    HERMES: _Form("<tool_call>", True, "arguments", "</tool_call>", r"\n?", r"(.|\n)*", True),
    # An answer without calls must not begin like a call: the parser would take it for one.
    LLAMA3_JSON: _Form("<|python_tag|>", False, "parameters", "", r"; ?", r"\s*(([^\s{<]|<[^|])(.|\n)*)?", False),
}


def tool_guide(
    parser: str,
    functions: Sequence[GuidedFunction],
    *,
    is_forced: bool,
    is_single: bool,
    content: str | None,
    is_special: Callable[[str], bool],
) -> GuidedDecodingParams:
    """Returns a guide in llguidance's Lark for an answer that may call functions.

    is_forced: the answer has a call and no text. is_single: it has at most one call. content: JSON schema of an answer
    without calls; None: any text. is_special: true if a text is a special token of the tokenizer.
    """
    form = _FORMS[parser]
    marker, end = (_token(text, is_special) for text in (form.marker, form.end))
    space = r"(/[ \n]/)?" if form.end else ""
    names = [f"function_{i}" for i in range(len(functions))]
    any_function = " | ".join(names)
    name_key, arguments_key = (_literal(json.dumps(key)) for key in ("name", form.key))
    rules = [
        "%llguidance {}",
        # The lexer does not backtrack: a call's object begins with the same tokens as any other JSON object.
        r"COLON: /: ?/",
        r"COMMA: /, ?/",
        f'body: {space} "{{" {name_key} COLON ({any_function}) "}}" {space} {end}',
        *(
            f"{name}: {_literal(json.dumps(function.name, ensure_ascii=False))} COMMA {arguments_key} "
            f"COLON %json {function.schema(is_forced=is_forced)}"
            for name, function in zip(names, functions, strict=True)
        ),
        f"call: {marker}{'' if form.needs_marker else '?'} body",
        f"calls: call{'' if is_single else f' (/{form.between}/ call)*'}",
    ]
    if is_forced:
        rules.append("start: calls")
    elif content is not None:
        rules += ["start: calls | content", f"content: %json {with_json_options(_one_line(content), COMPACT_JSON)}"]
    elif not form.has_text_before:
        rules += ["start: calls | text", "text: TEXT", f"TEXT: /{form.text}/"]
    else:
        rules += ["start: call_in_text | text" if is_single else "start: call_in_text* text", "text: TEXT"]
        if is_special(form.marker):
            rules.append(f"call_in_text: TEXT {marker} body")
        else:
            rules += ["call_in_text: before_call body", f"before_call[lazy]: TEXT {marker}"]
        rules.append(f"TEXT: /{form.text}/")
    return GuidedDecodingParams(GuidedDecodingParams.GuideType.EBNF_GRAMMAR, "\n".join(rules) + "\n")


def _one_line(schema: str) -> str:
    """Returns the schema without line breaks, which would end a rule. Raises ApiError for invalid JSON."""
    try:
        return json.dumps(json.loads(schema))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the guide's JSON schema is not JSON: {error}") from error


def _token(text: str, is_special: Callable[[str], bool]) -> str:
    if not text:
        return ""
    return text if is_special(text) else _literal(text)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
