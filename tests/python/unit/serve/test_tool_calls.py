"""Calls in answers that are cut into any pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from adaptrt.serve.tool_calls import HERMES, LLAMA3_JSON, PARSERS, FunctionCall

NAMES = {"weather", "time"}
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
    parser = PARSERS[kind](NAMES)
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    calls = [part for part in parts if isinstance(part, FunctionCall)]
    assert len({call.call_id for call in calls}) == len(calls)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


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
    "hermes: NaN": (HERMES, hermes(("time", {"a": float("nan")})), (hermes(("time", {"a": float("nan")})), [])),
    "hermes: an infinite number": (
        HERMES,
        '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>',
        ('<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>', []),
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


def test_text_is_given_before_a_call_and_each_call_when_it_is_complete() -> None:
    parser = PARSERS[HERMES](NAMES)
    assert parser.add("See: <tool") == ["See:"]
    assert parser.add(hermes(WEATHER).removeprefix("<tool").removesuffix(">")) == []
    (call,) = parser.add("> <to")
    assert isinstance(call, FunctionCall)
    assert (call.name, json.loads(call.arguments)) == WEATHER


def test_half_a_surrogate_pair_can_be_sent() -> None:
    parser = PARSERS[HERMES](NAMES)
    (call,) = parser.add('<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>')
    assert isinstance(call, FunctionCall)
    call.arguments.encode()
