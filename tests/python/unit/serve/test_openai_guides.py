"""The guide of a request's fields, under any of their names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptrt import GuidedDecodingParams
from adaptrt.serve.errors import ApiError
from adaptrt.serve.http import parse_json
from adaptrt.serve.openai_fields import CompletionRequest
from adaptrt.serve.openai_guides import guide_of, json_schema_of
from adaptrt.serve.options import ServerLimits

Type = GuidedDecodingParams.GuideType
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "json_object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


def asked(**fields: Any) -> GuidedDecodingParams | None:
    body = json.dumps({"prompt": "a", **fields}).encode()
    return guide_of(parse_json(body, CompletionRequest, ServerLimits()))


@pytest.mark.parametrize(
    ("fields", "kind", "guide"),
    [
        ({"response_format": OBJECT}, Type.JSON, None),
        ({"response_format": FORMAT}, Type.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"response_format": {"type": "structural_tag", **TAG}}, Type.STRUCTURAL_TAG, json.dumps(TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, Type.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": "{}"}}, Type.JSON_SCHEMA, "{}"),
        ({"structured_outputs": {"json_object": True}}, Type.JSON, None),
        ({"structured_outputs": {"regex": "a+"}}, Type.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, Type.REGEX, r"(a\.b)|(c)"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Type.EBNF_GRAMMAR, "start: /a/"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Type.STRUCTURAL_TAG, json.dumps(TAG)),
        ({"guided_json": True}, Type.JSON_SCHEMA, "true"),
        ({"guided_regex": "a+"}, Type.REGEX, "a+"),
        ({"guided_choice": ["a"]}, Type.REGEX, "(a)"),
        ({"guided_grammar": "start: /a/"}, Type.EBNF_GRAMMAR, "start: /a/"),
    ],
)
def test_each_name(fields: dict[str, Any], kind: Type, guide: str | None) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.guide_type, found.guide) == (kind, guide)


def test_without_a_guide_there_is_none() -> None:
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None


def test_one_guide_may_be_given_under_several_names() -> None:
    grammar = "start: /a/"
    both = asked(structured_outputs={"grammar": grammar}, guided_grammar=grammar)
    assert both is not None
    assert (both.guide_type, both.guide) == (Type.EBNF_GRAMMAR, grammar)
    # The spelling of JSON does not count.
    spelled = asked(response_format=FORMAT, guided_json=json.dumps(SCHEMA, indent=2))
    assert spelled is not None
    assert spelled.guide_type == Type.JSON_SCHEMA
    assert asked(response_format={"type": "text"}, guided_regex="a") is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": OBJECT}, "guided_regex"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": {}}}, "guided_json"),
        ({"guided_json": "{", "structured_outputs": {"json": "["}}, "guided_json"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "guided_json"),
    ],
)
def test_two_guides_that_differ_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="are given, and they differ; expected one guide") as refused:
        asked(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
        ({"response_format": FORMAT, "guided_whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x"}}, {"whitespace_pattern": "x"}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, {"whitespace_flexible": True}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, None),
    ],
)
def test_whitespace_of_json(fields: dict[str, Any], options: dict[str, Any] | None) -> None:
    found = asked(**fields)
    assert found is not None
    expected = SCHEMA if options is None else {"x-guidance": options, **SCHEMA}
    assert json.loads(found.guide or "") == expected


def test_whitespace_of_any_object() -> None:
    found = asked(response_format=OBJECT, guided_whitespace_pattern=" ")
    assert found is not None
    assert json.loads(found.guide or "") == {"x-guidance": {"whitespace_pattern": " "}, "type": "object"}


@pytest.mark.parametrize("fields", [{}, {"guided_regex": "a"}])
def test_whitespace_belongs_to_json(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="guided_whitespace_pattern is given without a guide that makes JSON"):
        asked(**fields, guided_whitespace_pattern=" ")


def test_whitespace_is_described_once() -> None:
    with pytest.raises(ApiError, match="described twice"):
        asked(guided_json={"x-guidance": {}}, guided_whitespace_pattern=" ")


def test_the_schema_of_answers() -> None:
    assert json_schema_of(GuidedDecodingParams(Type.JSON)) == '{"type": "object"}'
    assert json_schema_of(GuidedDecodingParams(Type.JSON_SCHEMA, "{}")) == "{}"
    assert json_schema_of(GuidedDecodingParams(Type.REGEX, "a")) is None
