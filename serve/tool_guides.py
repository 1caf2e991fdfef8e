"""Writes guides for answers that call functions, in the format that the parsers of tools/ read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .._core import GuidedDecodingParams
from ..runtime.guided_decoding import COMPACT_JSON, with_json_options
from .errors import ApiError
from .tools.form import CallForm, CallRule, literal

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
        return self.rule(is_forced=is_forced).schema

    def rule(self, *, is_forced: bool) -> CallRule:
        """Returns the function as the rules of a grammar see it. Raises ApiError like schema()."""
        if not self.is_strict and not is_forced:
            any_object = with_json_options(json.dumps(_ANY_OBJECT), COMPACT_JSON)
            return CallRule(self.name, any_object, None, COMPACT_JSON, self.place)
        parameters = _NO_ARGUMENTS if self.parameters is None else self.parameters
        kind = parameters.get("type", "object")
        if kind != "object":
            field = f"{self.place}.parameters.type"
            raise ApiError(f"{field} of '{self.name}' is {kind!r}; expected 'object'", param=field)
        if "properties" in parameters and not _OPEN & parameters.keys():
            parameters = {**parameters, "additionalProperties": False}
        guidance = COMPACT_JSON if self.is_strict else {**COMPACT_JSON, "lenient": True}
        whole = {"type": "object", **parameters}
        return CallRule(self.name, with_json_options(json.dumps(whole), guidance), whole, guidance, self.place)


def tool_guide(
    form: CallForm,
    functions: Sequence[GuidedFunction],
    *,
    is_forced: bool,
    is_single: bool,
    content: str | None,
    special: Callable[[str], int | None],
) -> GuidedDecodingParams:
    """Returns a guide in llguidance's Lark for an answer that may call functions.

    is_forced: the answer has a call and no text. is_single: it has at most one call. content: JSON schema of an answer
    without calls; None: any text. special: id of the special token of the tokenizer that is a text.
    """

    def token(text: str) -> str:
        number = special(text)
        return literal(text) if number is None else f"<[{number}]>"

    calls = [function.rule(is_forced=is_forced) for function in functions]
    made = form.grammar(calls, is_single=is_single, token=token)
    marker = token(made.marker)
    between = f"/{made.between}/ " if made.between else ""
    rules = [
        "%llguidance {}",
        *made.rules,
        f"body: {made.body}",
        f"marked: {marker}{'?' if made.is_marker_optional else ''} body",
        f"calls: marked{'' if is_single or not made.repeats else f' ({between}marked)*'}",
    ]
    if is_forced:
        rules.append("start: calls")
    elif content is not None:
        rules += ["start: calls | content", f"content: %json {with_json_options(_one_line(content), COMPACT_JSON)}"]
    elif made.is_marker_optional:
        rules += ["start: calls | text", "text: TEXT", f"TEXT: /{made.text}/"]
    else:
        is_once = is_single or not made.repeats
        rules += ["start: call_in_text | text" if is_once else "start: call_in_text* text", "text: TEXT"]
        if special(made.marker) is not None:
            rules.append(f"call_in_text: TEXT {marker} body")
        else:
            rules += ["call_in_text: before_call body", f"before_call[lazy]: TEXT {marker}"]
        rules.append(f"TEXT: /{made.text}/")
    return GuidedDecodingParams(GuidedDecodingParams.GuideType.EBNF_GRAMMAR, "\n".join(rules) + "\n")


def _one_line(schema: str) -> str:
    """Returns the schema without line breaks, which would end a rule. Raises ApiError for invalid JSON."""
    try:
        return json.dumps(json.loads(schema))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the guide's JSON schema is not JSON: {error}") from error
