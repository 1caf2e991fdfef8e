"""Finds the guide of a request in OpenAI's response_format or vLLM's structured outputs, under new or old names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .._core import GuidedDecodingParams
from ..runtime.guided_decoding import with_json_options
from .errors import ApiError
from .openai_fields import GenerationFields, StructuredOutputs

_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""Characters with a special meaning in regular expressions."""
_TYPES: Final = GuidedDecodingParams.GuideType
_JSON_TYPES: Final = (_TYPES.JSON, _TYPES.JSON_SCHEMA)
_ANY_OBJECT: Final = '{"type": "object"}'


def guide_of(fields: GenerationFields) -> GuidedDecodingParams | None:
    """Returns the request's guide; None: it has none.

    Clients may send the same guide under several names. Raises ApiError for two different guides, and for JSON options
    without a JSON guide.
    """
    guides = _guides_of(fields)
    if not guides:
        if fields.guided_whitespace_pattern:
            raise _whitespace_without_json()
        return None
    name, guide = next(iter(guides.items()))
    for other_name, other in guides.items():
        if _meaning(other) != _meaning(guide):
            raise ApiError(f"{name} and {other_name} are given, and they differ; expected one guide", param=other_name)
    if fields.guided_whitespace_pattern:
        if guide.guide_type not in _JSON_TYPES:
            raise _whitespace_without_json()
        return _json_with_options(guide, {"whitespace_pattern": fields.guided_whitespace_pattern})
    return guide


def json_schema_of(guide: GuidedDecodingParams) -> str | None:
    """Returns the JSON schema of answers under a guide; None: they need not be JSON."""
    if guide.guide_type == _TYPES.JSON:
        return _ANY_OBJECT
    return guide.guide if guide.guide_type == _TYPES.JSON_SCHEMA else None


def _guides_of(fields: GenerationFields) -> dict[str, GuidedDecodingParams]:
    """Returns all guides of the request by field name."""
    outputs = fields.structured_outputs
    guides = {
        "response_format": _of_response_format(fields),
        "structured_outputs": None if outputs is None else _of_structured_outputs(outputs),
        "guided_json": _of_values(fields.guided_json, None, None, None),
        "guided_regex": _of_values(None, fields.guided_regex, None, None),
        "guided_choice": _of_values(None, None, fields.guided_choice, None),
        "guided_grammar": _of_values(None, None, None, fields.guided_grammar),
    }
    return {name: guide for name, guide in guides.items() if guide is not None}


def _meaning(guide: GuidedDecodingParams) -> tuple[GuidedDecodingParams.GuideType, Any]:
    """Returns a value that is equal for equivalent guides. Ignores how a JSON schema is spelled."""
    if guide.guide_type != _TYPES.JSON_SCHEMA:
        return guide.guide_type, guide.guide
    try:
        return guide.guide_type, json.loads(guide.guide or "")
    except (ValueError, RecursionError):  # llguidance reports the error later
        return guide.guide_type, guide.guide


def _json_with_options(guide: GuidedDecodingParams, options: Mapping[str, Any]) -> GuidedDecodingParams:
    schema = json_schema_of(guide) or _ANY_OBJECT
    if '"x-guidance"' in schema:
        raise ApiError(
            "whitespace is described twice: by the schema's x-guidance and by a field of the request; expected one",
        )
    return GuidedDecodingParams(_TYPES.JSON_SCHEMA, with_json_options(schema, options))


def _whitespace_without_json() -> ApiError:
    return ApiError(
        "guided_whitespace_pattern is given without a guide that makes JSON; expected guided_json, "
        "structured_outputs.json, or response_format of type 'json_object' or 'json_schema'",
        param="guided_whitespace_pattern",
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
    if outputs.structural_tag is not None:
        return GuidedDecodingParams(_TYPES.STRUCTURAL_TAG, outputs.structural_tag)
    guide = _of_values(outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
    if guide is None:
        guide = GuidedDecodingParams(_TYPES.JSON)
    if outputs.whitespace_pattern:
        return _json_with_options(guide, {"whitespace_pattern": outputs.whitespace_pattern})
    if not outputs.disable_any_whitespace:
        return _json_with_options(guide, {"whitespace_flexible": True})
    return guide


def _of_values(
    schema: dict[str, Any] | bool | str | None, regex: str | None, choices: list[str] | None, grammar: str | None
) -> GuidedDecodingParams | None:
    """Returns the guide of the only value that is set; None: all are None."""
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
