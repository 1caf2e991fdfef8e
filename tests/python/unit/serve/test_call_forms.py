"""Calls in each format: what a model writes, a guide accepts, and the parser returns it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptrt.serve.errors import ApiError
from adaptrt.serve.tool_guides import GuidedFunction, tool_guide
from adaptrt.serve.tools.forms import FORMS
from support.answers import Answer, split
from support.call_forms import WRITERS, Call

FEW = settings(max_examples=30, deadline=None)
TOKENIZER = llguidance.LLTokenizer("byte")
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "exact": {"type": "boolean"},
        "sort": {"enum": ["new", "old"]},
        "where": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["query"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"search": SEARCH, "search_all": None}
# llguidance's JSON has no DEL that is not escaped.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)
OPTIONAL = {
    "limit": st.integers(-5, 10**20),
    "exact": st.booleans(),
    "sort": st.sampled_from(["new", "old"]),
    "where": st.fixed_dictionaries({}, optional={"tags": st.lists(TEXTS, max_size=2)}),
    "note": st.none() | st.sampled_from(["a b", "</tool_call>", "é\n"]),
}
ODD = st.sampled_from(
    [
        *("", "\n", "a\n", " ", "</", "</parameter>", "</arg_value>", "</tool_call>", "<tool_call>", "[TOOL_CALLS]"),
        *("</invoke>", "<|tool_call_begin|>functions.search:0", "<|tool_call_start|>[", '<invoke name="search">'),
        *('"', "\\", "}", "]", "```", "<function=search>", "日本", "🎉", "functools[", "[ARGS]{", "x"),
        *("<escape>", '<|"|>', "<start_function_call>call:search{"),
    ]
)
QUERIES = st.lists(ODD, max_size=4).map("".join) | TEXTS
SEARCHES = st.tuples(st.just("search"), st.fixed_dictionaries({"query": QUERIES}, optional=OPTIONAL))
CALLS = st.lists(SEARCHES | st.just(("search_all", {})), min_size=1, max_size=3)
ANSWERS = Path(__file__).parent / "answers"


def in_order(calls: Sequence[Call]) -> list[Call]:
    """Guides write arguments in the order of the schema."""
    return [(name, {key: values[key] for key in SEARCH["properties"] if key in values}) for name, values in calls]


def pieces_of(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@lru_cache
def grammar(form: str, **options: Any) -> str:
    functions = [
        GuidedFunction(name, parameters, True, f"tools[{i}].function")
        for i, (name, parameters) in enumerate(FUNCTIONS.items())
    ]
    asked = {"is_forced": True, "is_single": False, "content": None, **options}
    return str(tool_guide(FORMS[form], functions, special=lambda _: None, **asked).guide)


@lru_cache
def matcher(text: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", text))
    assert not made.is_error(), made.get_error()
    return made


def accepts(text: str, answer: str) -> bool:
    """True if a guide lets a model write the whole answer and end there."""
    made = matcher(text)
    made.reset()
    tokens = TOKENIZER.tokenize_str(answer)
    return bool(made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting())


def closes_early(form: str, calls: Sequence[Call]) -> bool:
    """True if a text has the tag that ends it: a parser can see past it, a guide cannot."""
    tagged = dict.fromkeys(("seed_oss", "minimax_m2"), "</parameter>\n")
    end = {"qwen3_coder": "\n</parameter>\n", "glm45": "</arg_value>", **tagged}.get(form)
    texts = [value for _, values in calls for value in values.values() if isinstance(value, str)]
    return end is not None and any(end in f"{text}\n" for text in texts)


def looks_ended(form: str, calls: Sequence[Call]) -> bool:
    """True if a text has an end tag and what may follow it: no parser can know that the text goes on."""
    ended = {
        "qwen3_coder": r"</parameter>\s*(<parameter=|</function>|</tool_call>)",
        "seed_oss": r"</parameter>\s*(<parameter=|</function>|</seed:tool_call>)",
        "minimax_m2": r"</parameter>\s*(<parameter name=|</invoke>|</minimax:tool_call>)",
        "functiongemma": "<escape>",
        "gemma4": '<|"|>',
        "glm45": r"</arg_value>\s*(<arg_key>|</tool_call>)",
    }.get(form)
    texts = [value for _, values in calls for value in values.values() if isinstance(value, str)]
    return ended is not None and any(re.search(ended, text) for text in texts)


@pytest.mark.parametrize("form", WRITERS)
@FEW
@given(calls=CALLS, size=st.integers(1, 40))
def test_written_calls_are_accepted_and_found(form: str, calls: list[Call], size: int) -> None:
    calls = in_order(calls)
    assume(not looks_ended(form, calls))
    answer = WRITERS[form](calls)
    assert split(form, pieces_of(answer, size), FUNCTIONS) == Answer("", "", calls, "c" * len(calls))
    if not closes_early(form, calls):
        assert accepts(grammar(form), answer), answer
        assert accepts(grammar(form, is_single=True), answer) == (len(calls) == 1)


@pytest.mark.parametrize("form", WRITERS)
def test_a_guide_accepts_only_calls_that_follow_the_schema(form: str) -> None:
    write = WRITERS[form]
    for wrong in ({}, {"query": "a", "limit": "x"}, {"query": "a", "sort": "up"}, {"query": "a", "more": 1}):
        assert not accepts(grammar(form), write([("search", wrong)])), wrong
    assert not accepts(grammar(form), write([("other", {})]))
    assert not accepts(grammar(form), "Hello")
    text = grammar(form, is_forced=False)
    assert accepts(text, "Hello")
    assert accepts(text, "")
    assert not accepts(text, write([("search", {})]))
    if form not in ("llama3_json", "llama4_pythonic"):
        assert accepts(text, "Hello " + write([("search", {"query": "a"})]))


@pytest.mark.parametrize("form", WRITERS)
@FEW
@given(data=st.data())
def test_any_text_is_split_alike_however_it_is_cut(form: str, data: st.DataObject) -> None:
    whole = WRITERS[form](data.draw(CALLS))
    inner = data.draw(st.lists(ODD, max_size=3).map("".join))
    at = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(at, len(whole)))
    answer = data.draw(QUERIES) + whole[:at] + inner + whole[end:] + data.draw(QUERIES)
    expected = split(form, [answer], FUNCTIONS)
    for size in (1, 3):
        assert split(form, pieces_of(answer, size), FUNCTIONS) == expected


CORPUS = [
    pytest.param(path.stem.partition(".")[0], case, id=f"{path.stem}: {case['about']}")
    for path in sorted(ANSWERS.glob("*.json"))
    for case in json.loads(path.read_text())
]


@pytest.mark.parametrize(("form", "case"), CORPUS)
def test_answers_as_models_write_them(form: str, case: dict[str, Any]) -> None:
    calls = [(name, arguments) for name, arguments in case.get("calls", [])]
    expected = Answer(case.get("text", ""), case.get("reasoning", ""), calls, case["order"])
    answer = case["answer"]
    for size in (len(answer), 1, 2, 7):
        assert split(form, pieces_of(answer, size), FUNCTIONS) == expected


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"properties": {}, "additionalProperties": True}, "additionalProperties"),
        ({"type": "object"}, "additionalProperties"),
        ({"properties": {}, "anyOf": [{}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 2}, {}]}}}, "properties.a.anyOf"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}, "properties.a.$ref"),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "minimax_m2", "glm45"])
def test_tags_cannot_enforce_every_schema(form: str, parameters: dict[str, Any], field: str) -> None:
    def made(*, is_strict: bool) -> str:
        function = GuidedFunction("f", parameters, is_strict, "tools[0].function")
        options: dict[str, Any] = {"is_forced": True, "is_single": True, "content": None}
        return str(tool_guide(FORMS[form], [function], special=lambda _: None, **options).guide)

    with pytest.raises(ApiError, match="of 'f' cannot be enforced, because the model writes arguments") as raised:
        made(is_strict=True)
    assert raised.value.param == f"tools[0].function.parameters.{field}"
    assert accepts(made(is_strict=False), WRITERS[form]([("f", {"a": "x"} if "a" in field else {})]))


@pytest.mark.parametrize("form", WRITERS)
def test_functions_that_are_not_strict_take_any_arguments(form: str) -> None:
    functions = [GuidedFunction("search", SEARCH, False, "tools[0].function")]
    options: dict[str, Any] = {"is_forced": False, "is_single": True, "content": None}
    guide = str(tool_guide(FORMS[form], functions, special=lambda _: None, **options).guide)
    assert accepts(guide, WRITERS[form]([("search", {"limit": "none", "more": {"a": [1]}})]))


@pytest.mark.parametrize("form", [form for form in WRITERS if FORMS[form].marks])
def test_markers_that_are_special_tokens_are_written_as_tokens(form: str) -> None:
    functions = [GuidedFunction("search", SEARCH, True, "tools[0].function")]
    numbers = {mark: 1000 + i for i, mark in enumerate(FORMS[form].marks)}
    options: dict[str, Any] = {"is_forced": False, "is_single": False, "content": None}
    guide = str(tool_guide(FORMS[form], functions, special=numbers.get, **options).guide)
    assert "<[1000]>" in guide
    answer = WRITERS[form]([("search", {"query": "q"})])
    used = {f"<[{number}]>" for mark, number in numbers.items() if mark in answer}
    assert all(number in guide for number in used)
    literals = [mark for mark in numbers if f'"{mark}"' in guide]
    assert not literals


@pytest.mark.parametrize("form", ["llama4_pythonic", "gemma3", "lfm2"])
def test_python_has_names_of_arguments(form: str) -> None:
    functions = [GuidedFunction("f", {"properties": {"a-b": {}}}, True, "tools[0].function")]
    options: dict[str, Any] = {"is_forced": True, "is_single": True, "content": None}
    with pytest.raises(ApiError, match="of 'f' has 'a-b'; expected names of arguments in Python") as raised:
        tool_guide(FORMS[form], functions, special=lambda _: None, **options)
    assert raised.value.param == "tools[0].function.parameters.properties"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@FEW
@given(value=VALUES, size=st.integers(1, 9))
def test_any_literal_of_python_becomes_json(value: Any, size: int) -> None:
    answer = f"[search_all(value={value!r}, other=1)]"
    expected = Answer("", "", [("search_all", {"value": value, "other": 1})], "c")
    assert split("llama4_pythonic", pieces_of(answer, size), FUNCTIONS) == expected


def test_gemma_s_format_cannot_enforce_every_schema() -> None:
    def made(schema: dict[str, Any], *, is_strict: bool) -> str:
        parameters = {"properties": {"a": schema}}
        function = GuidedFunction("f", parameters, is_strict, "tools[0].function")
        options: dict[str, Any] = {"is_forced": True, "is_single": True, "content": None}
        return str(tool_guide(FORMS["gemma4"], [function], special=lambda _: None, **options).guide)

    for schema, field in (
        ({"type": "string", "pattern": "b"}, "a.pattern"),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1}, "a.minItems"),
        ({"type": "object", "properties": {"b": {"type": "string", "format": "date"}}}, "a.properties.b.format"),
        ({"type": "object", "properties": {"b": {}}, "additionalProperties": True}, "a.additionalProperties"),
        ({"enum": [[1]]}, "a.enum"),
    ):
        with pytest.raises(
            ApiError, match="of 'f' cannot be enforced, because the model does not write JSON"
        ) as raised:
            made(schema, is_strict=True)
        assert raised.value.param == f"tools[0].function.parameters.properties.{field}"
    lenient = made({"type": "string", "pattern": "b"}, is_strict=False)
    assert accepts(lenient, WRITERS["gemma4"]([("f", {"a": "x"})]))
    many = made({"type": ["string", "integer"]}, is_strict=True)
    for value, right in (("x", True), (5, True), (True, False), ([], False)):
        assert accepts(many, WRITERS["gemma4"]([("f", {"a": value})])) == right


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        ("llama4_pythonic", "[search_all(a="),
        ("gemma4", "<|tool_call>call:search_all{a:"),
        ("mistral", '[TOOL_CALLS][{"name": "search_all", "arguments": {"a":'),
    ],
)
def test_values_are_not_nested_too_deeply_for_clients(form: str, begin: str) -> None:
    answer = split(form, [begin + "[" * 200], FUNCTIONS)
    ((_, arguments),) = answer.calls
    assert 90 < arguments.count("[") <= 100
    assert answer.text.count("[") == 200 - arguments.count("[")
