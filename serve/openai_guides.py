"""What an answer is held to: OpenAI's response_format, and vLLM's structured outputs under both of their names."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from .._core import GuidedDecodingParams
from .openai_fields import GenerationFields, StructuredOutputs

_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""What has a meaning of its own in regular expressions."""
_TYPES: Final = GuidedDecodingParams.GuideType


def guide_of(fields: GenerationFields) -> GuidedDecodingParams | None:
    """The one guide that a request has; None: it has none."""
    outputs = fields.structured_outputs
    return (
        _of_response_format(fields)
        or _of_values(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
        or (None if outputs is None else _of_structured_outputs(outputs))
    )


def _of_response_format(fields: GenerationFields) -> GuidedDecodingParams | None:
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return GuidedDecodingParams(_TYPES.JSON)
    if form.type == "structural_tag":
        return GuidedDecodingParams(
            _TYPES.STRUCTURAL_TAG, json.dumps({"structures": form.structures, "triggers": form.triggers})
        )
    assert form.json_schema is not None
    return _of_json(form.json_schema.schema_)


def _of_structured_outputs(outputs: StructuredOutputs) -> GuidedDecodingParams:
    guide = _of_values(outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
    if guide is not None:
        return guide
    if outputs.structural_tag is not None:
        return GuidedDecodingParams(_TYPES.STRUCTURAL_TAG, outputs.structural_tag)
    return GuidedDecodingParams(_TYPES.JSON)


def _of_values(
    schema: dict[str, Any] | bool | str | None, regex: str | None, choices: list[str] | None, grammar: str | None
) -> GuidedDecodingParams | None:
    """Of what both names have, of which at most one is given."""
    if schema is not None:
        return _of_json(schema)
    if regex is not None:
        return GuidedDecodingParams(_TYPES.REGEX, regex)
    if choices is not None:
        return _of_choice(choices)
    if grammar is not None:
        return GuidedDecodingParams(_TYPES.EBNF_GRAMMAR, grammar)
    return None


def _of_json(schema: dict[str, Any] | bool | str) -> GuidedDecodingParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GuidedDecodingParams(_TYPES.JSON_SCHEMA, text)


def _of_choice(choices: list[str]) -> GuidedDecodingParams:
    return GuidedDecodingParams(_TYPES.REGEX, "|".join(f"({_META.sub(_escaped, choice)})" for choice in choices))


def _escaped(letter: re.Match[str]) -> str:
    return f"\\{letter[0]}"
