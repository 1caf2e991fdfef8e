"""Guides for answers that call functions, and the texts that they allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import pytest

from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.errors import ApiError
from adaptrt.serve.tool_guides import GuidedFunction, tool_guide
from adaptrt.serve.tools.forms import FORMS, HERMES, LLAMA3_JSON
from support.answers import split
from support.tokenizers import byte_level

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOKENIZER = llguidance.LLTokenizer("byte")


def function(name: str = "w", parameters: Any = CITY, *, is_strict: bool = True) -> GuidedFunction:
    return GuidedFunction(name, parameters, is_strict, "tools[0].function")


def guide(parser: str, functions: Sequence[GuidedFunction], special: Sequence[str] = (), **options: Any) -> str:
    numbers = {text: number for number, text in enumerate(special)}
    asked = {"is_forced": False, "is_single": False, "content": None, **options}
    return str(tool_guide(FORMS[parser], functions, special=numbers.get, **asked).guide)


def accepted(grammar: str, text: str) -> bool:
    """True if the guide lets a model write the whole text and end there."""
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def hermes(arguments: str, name: str = "w") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(arguments: str, name: str = "w") -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


PARIS = '{"city": "Paris"}'
CALLS = {HERMES: hermes, LLAMA3_JSON: llama}
BETWEEN = {HERMES: "\n", LLAMA3_JSON: "; "}


@pytest.mark.parametrize("parser", CALLS)
def test_a_forced_answer_is_calls_that_the_parser_finds(parser: str) -> None:
    call, between = CALLS[parser], BETWEEN[parser]
    other = function("other", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = guide(parser, [function(), other], is_forced=True)
    text = call(PARIS) + between + call('{"n": 5}', "other")
    assert accepted(grammar, call(PARIS))
    assert accepted(grammar, text)
    found = split(parser, [text], {"w": CITY, "other": {}})
    assert found.calls == [("w", {"city": "Paris"}), ("other", {"n": 5})]
    for wrong in ("", "Hello", "Hello " + call(PARIS), call("{}"), call('{"n": "a"}', "other"), call(PARIS, "third")):
        assert not accepted(grammar, wrong), wrong
    single = guide(parser, [function()], is_forced=True, is_single=True)
    assert accepted(single, call(PARIS))
    assert not accepted(single, call(PARIS) + between + call(PARIS))


def test_text_before_strict_calls_is_free() -> None:
    grammar = guide(HERMES, [function()])
    for text in ("", "Hello", "a < b <tool", "Let me look.\n" + hermes(PARIS), hermes(PARIS) + "\n" + hermes(PARIS)):
        assert accepted(grammar, text), text
    for text in (hermes("{}"), "Hello " + hermes("[]"), hermes(PARIS) + hermes("{}"), "<tool_call>"):
        assert not accepted(grammar, text), text
    single = guide(HERMES, [function()], is_single=True)
    assert accepted(single, "Let me look. " + hermes(PARIS))
    assert not accepted(single, hermes(PARIS) + hermes(PARIS))


def test_an_answer_without_a_marker_is_a_call_or_text() -> None:
    grammar = guide(LLAMA3_JSON, [function()])
    for text in ("", "Hello", "a {", llama(PARIS), "<|python_tag|>" + llama(PARIS), "<b>"):
        assert accepted(grammar, text), text
    for text in (llama("{}"), "{", ' {"name": "w", "parameters": {}}', "<|python_tag|>" + llama("{}")):
        assert not accepted(grammar, text), text


def test_functions_that_are_not_strict_take_any_arguments() -> None:
    loose = function("loose", is_strict=False)
    grammar = guide(HERMES, [function(), loose])
    assert accepted(grammar, hermes('{"anything": [1]}', "loose"))
    assert not accepted(grammar, hermes('{"anything": [1]}'))
    # A forced call follows the parameters as far as they can be enforced.
    lenient = {**CITY, "properties": {"city": {"type": "string", "format": "of-my-own"}}}
    forced = guide(HERMES, [function("loose", lenient, is_strict=False)], is_forced=True)
    assert accepted(forced, hermes(PARIS, "loose"))
    assert not accepted(forced, hermes("{}", "loose"))


def test_a_function_without_parameters_has_no_arguments() -> None:
    grammar = guide(HERMES, [function(parameters=None)], is_forced=True)
    assert accepted(grammar, hermes("{}"))
    assert not accepted(grammar, hermes(PARIS))


def test_arguments_have_the_names_of_the_parameters() -> None:
    parameters = {"properties": {"city": {"type": "string"}}}
    more = '{"city": "Paris", "more": 1}'
    assert not accepted(guide(HERMES, [function(parameters=parameters)], is_forced=True), hermes(more))
    for wider in ({"additionalProperties": True}, {"patternProperties": {"^m": {}}}):
        grammar = guide(HERMES, [function(parameters={**parameters, **wider})], is_forced=True)
        assert accepted(grammar, hermes(more)), wider
    assert accepted(guide(HERMES, [function(parameters={"type": "object"})], is_forced=True), hermes(more))


def test_parameters_may_have_definitions_of_their_own() -> None:
    parameters = {
        "$defs": {"c": {"enum": ["Paris", "Rome"]}},
        "properties": {"city": {"$ref": "#/$defs/c"}},
        "required": ["city"],
    }
    grammar = guide(HERMES, [function(parameters=parameters)], is_forced=True)
    assert accepted(grammar, hermes(PARIS))
    assert not accepted(grammar, hermes('{"city": "Oslo"}'))


@pytest.mark.parametrize("parser", CALLS)
def test_an_answer_without_calls_follows_the_schema_of_the_content(parser: str) -> None:
    schema = '{\n"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]\n}'
    grammar = guide(parser, [function()], content=schema)
    assert accepted(grammar, '{"a": 1}')
    assert accepted(grammar, CALLS[parser](PARIS))
    assert not accepted(grammar, "Hello")
    assert not accepted(grammar, '{"a": "b"}')
    with pytest.raises(ApiError, match="the guide's JSON schema is not JSON"):
        guide(parser, [function()], content="{\nstart: /.*/")


def test_markers_that_are_special_tokens_are_matched_as_tokens() -> None:
    tokenizer = byte_level()
    assert Vocabulary(tokenizer).special_id("<|im_start|>") == tokenizer.token_to_id("<|im_start|>")
    assert Vocabulary(tokenizer).special_id("<tool_call>") is None
    assert Vocabulary(tokenizer).special_id("not there") is None
    grammar = guide(HERMES, [function()], special=["<tool_call>"])
    assert "\ncall_in_text: TEXT <[0]> body" in grammar


@pytest.mark.parametrize("name", ['a"b', "a\\b", "größe", "a.b-c_d", "名"])
def test_any_name_can_be_called(name: str) -> None:
    grammar = guide(HERMES, [function(name)], is_forced=True)
    call = f'<tool_call>{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {PARIS}}}</tool_call>'
    assert accepted(grammar, call)


def test_parameters_are_those_of_an_object() -> None:
    with pytest.raises(
        ApiError, match=r"tools\[0\].function.parameters.type of 'w' is 'array'; expected 'object'"
    ) as e:
        guide(HERMES, [function(parameters={"type": "array"})])
    assert e.value.param == "tools[0].function.parameters.type"


def test_whitespace_beside_a_call_is_json_s() -> None:
    grammar = guide(HERMES, [function()], is_forced=True)
    assert accepted(grammar, hermes(PARIS).replace("\n", " "))
    # Python and regular expressions know more whitespace than JSON.
    for letter in "\u1680\x0b\u00a0":
        assert not accepted(grammar, hermes(PARIS).replace("}\n", "}" + letter)), ascii(letter)
