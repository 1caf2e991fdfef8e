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
    guides = [guide for guide in (_of_response_format(fields), _of_names_of_then(fields)) if guide is not None]
    if fields.structured_outputs is not None:
        guides.append(_of_structured_outputs(fields.structured_outputs))
    return guides[0] if guides else None


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


def _of_names_of_then(fields: GenerationFields) -> GuidedDecodingParams | None:
    if fields.guided_json is not None:
        return _of_json(fields.guided_json)
    if fields.guided_regex is not None:
        return GuidedDecodingParams(_TYPES.REGEX, fields.guided_regex)
    if fields.guided_choice is not None:
        return _of_choice(fields.guided_choice)
    if fields.guided_grammar is not None:
        return GuidedDecodingParams(_TYPES.EBNF_GRAMMAR, fields.guided_grammar)
    return None


def _of_structured_outputs(outputs: StructuredOutputs) -> GuidedDecodingParams:
    if outputs.json_ is not None:
        return _of_json(outputs.json_)
    if outputs.regex is not None:
        return GuidedDecodingParams(_TYPES.REGEX, outputs.regex)
    if outputs.choice is not None:
        return _of_choice(outputs.choice)
    if outputs.grammar is not None:
        return GuidedDecodingParams(_TYPES.EBNF_GRAMMAR, outputs.grammar)
    if outputs.structural_tag is not None:
        return GuidedDecodingParams(_TYPES.STRUCTURAL_TAG, outputs.structural_tag)
    return GuidedDecodingParams(_TYPES.JSON)


def _of_json(schema: dict[str, Any] | bool | str) -> GuidedDecodingParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GuidedDecodingParams(_TYPES.JSON_SCHEMA, text)


def _of_choice(choices: list[str]) -> GuidedDecodingParams:
    return GuidedDecodingParams(_TYPES.REGEX, "|".join(f"({_META.sub(_escaped, choice)})" for choice in choices))


def _escaped(letter: re.Match[str]) -> str:
    return f"\\{letter[0]}"
