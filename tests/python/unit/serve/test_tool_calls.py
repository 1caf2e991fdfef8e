"""Calls in answers that are cut into any pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt.serve.answer_parts import CallArguments, CallBegin, CallEnd, TextPart
from adaptrt.serve.tools.form import Functions
from adaptrt.serve.tools.forms import ALIASES, AUTO, FORMS, HERMES, LLAMA3_JSON, MARKERS, form_of_template
from adaptrt.serve.tools.json_text import read_value
from adaptrt.serve.tools.reader import Marks, Steps, TextReader, drop
from adaptrt.serve.tools.sink import PartSink
from adaptrt.serve.tools.splitter import FormSplitter
from support.answers import split

FEW = settings(max_examples=30, deadline=None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = {"weather": None, "time": None}
WEATHER = ("weather", {"city": "Paris"})
TIME = ("time", {"zone": {"hours": 2}, "text": 'a "}" and \\'})


def call_text(call: tuple[str, object], key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]})


def hermes(call: tuple[str, object]) -> str:
    return f"<tool_call>\n{call_text(call, 'arguments')}\n</tool_call>"


def llama(call: tuple[str, object]) -> str:
    return call_text(call, "parameters")


def parse(kind: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, object]]]:
    """Returns the text and the calls of an answer."""
    answer = split(kind, pieces, NAMES)
    return answer.text, answer.calls


TAGGED = ("weather", {"city": 'a</tool_call>\\ "b'})
ENDLESS = '<tool_call>"\\"</tool_call>'
UNKNOWN = ("rm", {"path": "/"})
ANSWERS = {
    "hermes: text alone": (HERMES, "Hello <b> there \n", ("Hello <b> there \n", [])),
    "hermes: a call alone": (HERMES, hermes(WEATHER), ("", [WEATHER])),
    "hermes: text, then calls": (
        HERMES,
        f"Let me see.\n{hermes(WEATHER)}\n{hermes(TIME)}\n",
        ("Let me see.", [WEATHER, TIME]),
    ),
    "hermes: text behind a call": (HERMES, f"{hermes(TIME)} done", (" done", [TIME])),
    "hermes: without the last tag": (HERMES, hermes(TIME).removesuffix("</tool_call>"), ("", [TIME])),
    "hermes: malformed": (HERMES, 'a <tool_call>{"name": </tool_call> b', ('a <tool_call>{"name": </tool_call> b', [])),
    "hermes: malformed, then a call": (
        HERMES,
        "<tool_call>{</tool_call>" + hermes(TIME),
        ("<tool_call>{</tool_call>", [TIME]),
    ),
    "hermes: an end tag in an argument": (HERMES, hermes(TAGGED) + hermes(TIME), ("", [TAGGED, TIME])),
    "hermes: a string that does not end, then a call": (
        HERMES,
        f"{ENDLESS} b{hermes(WEATHER)} c",
        (f"{ENDLESS} b c", [WEATHER]),
    ),
    "hermes: unfinished": (HERMES, 'a <tool_call>{"name": "ti', ('a <tool_call>{"name": "ti', [])),
    "hermes: an unknown function": (HERMES, hermes(UNKNOWN), (hermes(UNKNOWN), [])),
    "hermes: arguments that are not an object": (HERMES, hermes(("time", [1])), (hermes(("time", [1])), [])),
    "hermes: NaN": (HERMES, hermes(("time", {"a": float("nan")})), ("NaN}}\n</tool_call>", [("time", '{"a": ')])),
    "hermes: an infinite number": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>',
        ("1e999}}</tool_call>", [("time", '{"a": ')]),
    ),
    "hermes: a number that is cut": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a": 1e',
        ("", [("time", '{"a": ')]),
    ),
    "hermes: an escape sequence that is cut": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a": "\\u12',
        ("", [("time", '{"a": "')]),
    ),
    "hermes: arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": [1, {}]}, "id": null, "name": "time"}</tool_call>',
        ("", [("time", {"a": [1, {}]})]),
    ),
    "hermes: no arguments": (HERMES, '<tool_call>{"name": "time"}</tool_call>', ("", [("time", {})])),
    "hermes: more fields": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {}, "id": "7", "more": [{"a": true}]}</tool_call> b',
        (" b", [("time", {})]),
    ),
    "hermes: a line break in a string": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a": "b\n\tc"}}</tool_call>',
        ("", [("time", {"a": "b\n\tc"})]),
    ),
    "hermes: a call in the arguments of an unknown function": (
        HERMES,
        hermes(("rm", {"path": hermes(TIME)})),
        (hermes(("rm", {"path": hermes(TIME)})), []),
    ),
    "hermes: one brace too many": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {}}}</tool_call>',
        ("}</tool_call>", [("time", {})]),
    ),
    "hermes: nested too deeply": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a":' + "[" * 200,
        ("[" * 101, [("time", '{"a":' + "[" * 99)]),
    ),
    "hermes: part of a tag at the end": (HERMES, "a <tool_", ("a <tool_", [])),
    "llama: text alone": (LLAMA3_JSON, "It is 5.", ("It is 5.", [])),
    "llama: a call": (LLAMA3_JSON, llama(TIME), ("", [TIME])),
    "llama: a call with its tag": (LLAMA3_JSON, f"<|python_tag|>{llama(WEATHER)}", ("", [WEATHER])),
    "llama: two calls": (LLAMA3_JSON, f" {llama(WEATHER)}; {llama(TIME)}\n", ("", [WEATHER, TIME])),
    "llama: arguments": (LLAMA3_JSON, call_text(TIME, "arguments"), ("", [TIME])),
    "llama: text before": (LLAMA3_JSON, f"I call {llama(TIME)}", (f"I call {llama(TIME)}", [])),
    "llama: JSON that is not a call": (LLAMA3_JSON, '{"a": 1} is JSON', ('{"a": 1} is JSON', [])),
    "llama: unfinished": (LLAMA3_JSON, '{"name": "time', ('{"name": "time', [])),
    "llama: text behind a call": (LLAMA3_JSON, f"{llama(TIME)} done", (" done", [TIME])),
    "llama: an unknown function": (LLAMA3_JSON, llama(UNKNOWN), (llama(UNKNOWN), [])),
    "llama: part of the tag": (LLAMA3_JSON, "<|pyt", ("<|pyt", [])),
    "llama: nested too deeply": (LLAMA3_JSON, '{"name":' + "[" * 5000, ('{"name":' + "[" * 5000, [])),
}


@pytest.mark.parametrize(("kind", "answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_answers_in_any_pieces(kind: str, answer: str, expected: object) -> None:
    assert parse(kind, [answer]) == expected
    assert parse(kind, answer) == expected
    for size in (2, 5, 11):
        assert parse(kind, [answer[i : i + size] for i in range(0, len(answer), size)]) == expected


def test_text_and_arguments_are_given_as_they_arrive() -> None:
    splitter = FormSplitter(lambda reader, sink: FORMS[HERMES].read(reader, sink, Functions(NAMES)))
    assert splitter.add("See: <tool") == [TextPart("See:")]
    assert splitter.add('_call>\n{"name": "weather", "arguments": ') == []
    begin, *arguments = splitter.add('{"city": "Pa')
    assert begin == CallBegin(0, getattr(begin, "call_id", ""), "weather")
    assert "".join(part.text for part in arguments if isinstance(part, CallArguments)) == '{"city": "Pa'
    assert splitter.add("ris") == [CallArguments(0, "ris")]
    assert splitter.add('"') == [CallArguments(0, '"')]
    assert splitter.add("}") == [CallArguments(0, "}"), CallEnd(0)]
    assert splitter.add("}\n</tool_call") == []
    assert [*splitter.add("> <to"), *splitter.finish()] == [TextPart(" <to")]


def test_half_a_surrogate_pair_can_be_sent() -> None:
    call = '<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>'
    assert split(HERMES, [call], NAMES).calls == [("time", {"a": "\ud800"})]


def read_whole(pieces: Sequence[str]) -> tuple[bool, str]:
    """Reads a JSON value that is the whole text. Returns if it is one, and its text."""
    splitter = FormSplitter(read_json)
    parts = [part for piece in pieces for part in splitter.add(piece)]
    parts += splitter.finish()
    return isinstance(parts[-1], CallEnd), "".join(part.text for part in parts if isinstance(part, CallArguments))


def read_json(reader: TextReader, sink: PartSink) -> Steps[None]:
    sink.begin("f")
    if (yield from read_value(reader, sink.arguments)):
        sink.end()


WRONG = ['"', '{"a": 1', "[1,]", "nul", '{"a" 1}', "{1: 2}", '{"a": 1,}', "01", '"\\x"', "[1 2]", "+1"]


@pytest.mark.parametrize("text", WRONG)
def test_json_that_is_wrong_is_not_read_as_a_value(text: str) -> None:
    assert read_whole([text])[0] is False


@FEW
@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), size=st.integers(1, 9))
def test_any_json_is_read_as_it_is_written(value: object, indent: int | None, is_ascii: bool, size: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert read_whole([text[i : i + size] for i in range(0, len(text), size)]) == (True, text)


MARKED = {
    "qwen": ('<tool_call>\\n{"name": "', HERMES),
    "llama": ('{"name": function name, "parameters": dictionary of', LLAMA3_JSON),
    "qwen coder": ("'\\n<tool_call>\\n<function=' + tool_call.name + '>\\n'", "qwen3_coder"),
    "mistral": ("[TOOL_CALLS][", "mistral"),
    "mistral with names": ("'[TOOL_CALLS]' + call.name + '[ARGS]'", "mistral_named"),
    "glm": ("<tool_call>{{ name }}\n<arg_key>", "glm45"),
    "deepseek v3": (
        "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
        "deepseek_v3",
    ),
    "deepseek v3.1": ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
    "granite": ("respond with <|tool_call|> followed by a JSON list", "granite"),
    "phi": ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini"),
    "llama 4": ("in the format of [func_name1(params_name1=params_value1, ...)]", "llama4_pythonic"),
    "gemma 3": ("wrap it with ```tool_code", "gemma3"),
    "function gemma": ("'<start_function_call>call:' + name + '{'", "functiongemma"),
    "gemma 4": ("'<|tool_call>call:' + name + '{'", "gemma4"),
    "phi with functools": ("formatted as functools[{", "phi4_mini_json"),
    "seed": ("<seed:tool_call><function=", "seed_oss"),
    "minimax": ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=", "minimax_m2"),
    "kimi": ("<|tool_calls_section_begin|>{{ call.id }}", "kimi_k2"),
    "lfm2": ("List of tools: <|tool_list_start|>[", "lfm2"),
    "another model's tags": ("<other:tool_call><function=", None),
    "none": ("{{ tools | tojson }}", None),
}


@pytest.mark.parametrize(("template", "form"), MARKED.values(), ids=MARKED)
def test_a_template_shows_its_form(template: str, form: str | None) -> None:
    assert form_of_template(f"{{% if tools %}}{template}{{% endif %}}") == form


def test_every_alias_and_marker_is_a_form() -> None:
    assert set(ALIASES.values()) | {form for form, _ in MARKERS} <= set(FORMS)
    assert not set(ALIASES) & {*FORMS, AUTO}


def test_the_longest_mark_that_begins_first_is_found() -> None:
    def read(reader: TextReader, sink: PartSink) -> Steps[None]:
        mark = yield from reader.until(Marks("ab", "abc", "b!"), drop)
        sink.text(mark)
        yield from reader.rest(drop)

    for text, mark in (("xabc", "abc"), ("xabd", "ab"), ("xab", "ab"), ("xb!ab", "b!"), ("xa", "")):
        for pieces in ([text], text):
            splitter = FormSplitter(read)
            parts = [part for piece in pieces for part in splitter.add(piece)]
            assert [*parts, *splitter.finish()] == ([TextPart(mark)] if mark else [])


def test_a_search_with_a_limit_does_not_read_the_rest() -> None:
    reader = TextReader()
    reader.add("x" * 3_000_000)
    reader.ended = True
    begin = time.process_time()
    for _ in range(3000):
        steps = reader.within(Marks("{", "[a]"), 10)
        with pytest.raises(StopIteration) as stop:
            next(steps)
        assert stop.value.value == ("x" * 10, "")
    # It takes milliseconds. If each search read the rest, it would take many seconds.
    assert time.process_time() - begin < 3


def test_a_model_s_own_ids_of_calls_are_kept_and_unique() -> None:
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    splitter = FormSplitter(lambda reader, sink: FORMS["kimi_k2"].read(reader, sink, Functions({"f": None})))
    parts = [*splitter.add(call * 2), *splitter.finish()]
    first, second = (part.call_id for part in parts if isinstance(part, CallBegin))
    assert first == "functions.f:3"
    assert second.startswith("call_")
