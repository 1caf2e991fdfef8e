"""Reasoning in each format: what a model writes, the parser splits off, and a guide lets it write."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import llguidance.hf
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt._core import GuidedDecodingParams, RequestError
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.answer_parts import AnswerPart, ReasoningPart, TextPart
from adaptrt.serve.conversation import SplitAnswer
from adaptrt.serve.errors import ApiError
from adaptrt.serve.generation import TextPiece
from adaptrt.serve.tool_guides import GuidedFunction, guide_after_reasoning, tool_guide
from adaptrt.serve.tools.form import Functions
from adaptrt.serve.tools.forms import (
    FORMS,
    OPENAI,
    REASONING_ALIASES,
    REASONING_FORMS,
    REASONING_MARKERS,
    reasoning_of_template,
)
from adaptrt.serve.tools.harmony import HarmonyForm
from adaptrt.serve.tools.reader import Steps, TextReader
from adaptrt.serve.tools.reasoning import read_text
from adaptrt.serve.tools.sink import PartSink
from adaptrt.serve.tools.splitter import FormSplitter
from support.answers import Answer, joined
from support.call_forms import WRITERS
from support.tokenizers import byte_level

FEW = settings(max_examples=30, deadline=None)
TOKENIZER = llguidance.LLTokenizer("byte")
HARMONY = "openai_gptoss"
FUNCTIONS = Functions({"search": None, "search_all": None})
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
OPENED = {HARMONY: ANALYSIS, "mistral": "[THINK]", "seed_oss": "<seed:think>"}
"""Texts that begin reasoning, by form; <think> in others."""


def splitter_of(form: str, opened: str = "", calls: str | None = None) -> FormSplitter:
    def read_answer(reader: TextReader, sink: PartSink) -> Steps[None]:
        if form == HARMONY:
            return HarmonyForm().read(reader, sink, FUNCTIONS)
        return read_text(reader, sink) if calls is None else FORMS[calls].read(reader, sink, FUNCTIONS)

    return FormSplitter(lambda reader, sink: REASONING_FORMS[form].read(reader, sink, read_answer), opened)


def split(form: str, pieces: Iterable[str], opened: str = "", calls: str | None = None) -> Answer:
    splitter = splitter_of(form, opened, calls)
    parts = [part for piece in pieces for part in splitter.add(piece)]
    return joined([*parts, *splitter.finish()])


CORPUS = [
    pytest.param(path.stem, case, id=f"{path.stem}: {case['about']}")
    for path in sorted((Path(__file__).parent / "reasoning").glob("*.json"))
    for case in json.loads(path.read_text())
]


@pytest.mark.parametrize(("form", "case"), CORPUS)
def test_answers_as_models_write_them(form: str, case: dict[str, Any]) -> None:
    calls = [(name, arguments) for name, arguments in case.get("calls", [])]
    expected = Answer(case.get("text", ""), case.get("reasoning", ""), calls, case["order"])
    opened, answer = REASONING_FORMS[form].opened_by(case.get("prompt", "")), case["answer"]
    for size in (len(answer), 1, 2, 7):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert split(form, pieces, opened, case.get("form")) == expected


ODD = st.sampled_from(
    [
        *("<think>", "</think>", "</thi", "[THINK]", "[/THINK]", "Here is my response:", "<response>", "</response>"),
        *(
            ANALYSIS,
            FINAL,
            NEXT,
            "<|call|>",
            "<|channel|>commentary to=functions.search <|constrain|>json<|message|>{}",
        ),
        *("\n", " ", "a", "日", "<tool_call>", '{"name": "search"}', "</tool_call>", "Here is my thought process:"),
    ]
)


@pytest.mark.parametrize("form", REASONING_FORMS)
@FEW
@given(answer=st.lists(ODD, max_size=9).map("".join), size=st.integers(1, 5), is_opened=st.booleans())
def test_any_answer_is_split_alike_however_it_is_cut(form: str, answer: str, size: int, is_opened: bool) -> None:
    opened = OPENED.get(form, "<think>") if is_opened else ""
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    assert split(form, pieces, opened, "hermes") == split(form, [answer], opened, "hermes")


def test_reasoning_is_given_as_it_arrives() -> None:
    splitter = splitter_of("qwen3", opened="<think>")
    assert splitter.add("\nLet me") == [ReasoningPart("Let me")]
    assert splitter.add(" see.\n</thi") == [ReasoningPart(" see.")]
    assert splitter.add("nk>\n\nIt") == [TextPart("It")]
    assert splitter.add(" is.") == [TextPart(" is.")]
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("form", "opened", "pieces", "count"),
    [
        ("qwen3", "", ["<think>", "a", " b", "</think>", "\n", "c"], 3),
        ("qwen3", "<think>", ["a", " b", "</think>", "c"], 3),
        ("qwen3", "<think>", ["a", " b"], 2),
        ("qwen3", "", ["a", " b"], 0),
        (HARMONY, "", [ANALYSIS, "a", "<|end|>", "<|start|>assistant", ANALYSIS, "b", NEXT, FINAL, "c"], 6),
    ],
)
def test_reasoning_tokens_are_counted(form: str, opened: str, pieces: list[str], count: int) -> None:
    offsets = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    answer = SplitAnswer(splitter_of(form, opened))
    for piece, offset in zip(pieces, offsets, strict=True):
        asyncio.run(answer.parts(TextPiece(piece, (1,), offsets=(offset,))))
    asyncio.run(answer.parts(TextPiece("", (), finish_reason="stop")))
    assert answer.num_reasoning_tokens == count
    whole = SplitAnswer(splitter_of(form, opened))
    text = TextPiece("".join(pieces), (1,) * len(pieces), finish_reason="stop", offsets=tuple(offsets))
    asyncio.run(whole.parts(text))
    assert whole.num_reasoning_tokens == count


def test_other_tasks_run_while_a_long_answer_is_split() -> None:
    class Slow:
        reasoning_spans: Sequence[tuple[float, float]] = ()

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def add(self, text: str) -> Sequence[AnswerPart]:
            time.sleep(0.004)
            self.lengths.append(len(text))
            return [TextPart(text)]

        def finish(self) -> Sequence[AnswerPart]:
            return [TextPart("!")]

    async def split(text: str) -> tuple[Sequence[AnswerPart], int, list[int]]:
        slow, turns, done = Slow(), 0, False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        parts = await SplitAnswer(slow).parts(TextPiece(text, (), finish_reason="stop"))
        done = True
        await task
        return parts, turns, slow.lengths

    text = "".join(map(str, range(3000)))
    parts, turns, lengths = asyncio.run(split(text))
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == f"{text}!"
    assert max(lengths) <= 1024
    assert turns >= len(lengths) > 5


TYPES = GuidedDecodingParams.GuideType
GUIDES = {
    "json": (GuidedDecodingParams(TYPES.JSON), '{"a": 1}', "[]"),
    "schema": (GuidedDecodingParams(TYPES.JSON_SCHEMA, '{"type":\n "integer"}'), "5", "a"),
    "regex": (GuidedDecodingParams(TYPES.REGEX, "a/b\\/c|d\n"), "a/b/c", "a"),
    "lark": (GuidedDecodingParams(TYPES.EBNF_GRAMMAR, 'start: "}" word\nword: "a" | "b"'), "}a", "}c"),
    "gbnf": (GuidedDecodingParams(TYPES.EBNF_GRAMMAR, 'root ::= "x" ("y" | "z")'), "xy", "x"),
}
REASONINGS = {
    "qwen3": "<think>hm {</think>\n\n",
    "mistral": "[THINK]hm[/THINK]",
    "seed_oss": "<seed:think>hm {</seed:think>\n",
    "granite": "Here is my thought process: hm\nHere is my response:\n",
    HARMONY: f"{ANALYSIS}hm{NEXT}",
}


def accepts(guide: GuidedDecodingParams, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", guide.guide))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("guide", "right", "wrong"), GUIDES.values(), ids=GUIDES)
@pytest.mark.parametrize("form", REASONING_FORMS)
def test_a_guide_begins_after_the_reasoning(form: str, guide: GuidedDecodingParams, right: str, wrong: str) -> None:
    thoughts, final = REASONINGS[form], FINAL if form == HARMONY else ""
    made = guide_after_reasoning(guide, REASONING_FORMS[form], "", lambda _: None)
    assert accepts(made, final + right)
    assert accepts(made, thoughts + final + right)
    for text in (wrong, thoughts + final + wrong, thoughts, ""):
        assert not accepts(made, text if text in ("", thoughts) else final + text), text
    opened = OPENED.get(form, "<think>")
    rest = {"granite": "hm</think>"}.get(form, thoughts.removeprefix(opened))
    begun = guide_after_reasoning(guide, REASONING_FORMS[form], opened, lambda _: None)
    assert accepts(begun, rest + final + right)
    assert not accepts(begun, final + right)


def test_reasoning_goes_before_a_regular_expression_of_any_text() -> None:
    any_text = GuidedDecodingParams(TYPES.REGEX, ".*!")
    guide = guide_after_reasoning(any_text, REASONING_FORMS["qwen3"], "", lambda _: None)
    for right in ("Hello!", "<think>a\nb</think>Hello!", "\n<think>a</think>!"):
        assert accepts(guide, right), right
    assert not accepts(guide, "<think>a!")
    begun = guide_after_reasoning(any_text, REASONING_FORMS["qwen3"], "<think>", lambda _: None)
    assert accepts(begun, "a</think><think>!")


def test_a_guide_that_cannot_follow_reasoning_is_refused_or_left() -> None:
    tags = GuidedDecodingParams(TYPES.STRUCTURAL_TAG, "{}")
    assert guide_after_reasoning(tags, REASONING_FORMS["qwen3"], "", lambda _: None) is tags
    with pytest.raises(ApiError, match="JSON schema is not JSON"):
        guide_after_reasoning(
            GuidedDecodingParams(TYPES.JSON_SCHEMA, "{"), REASONING_FORMS["qwen3"], "", lambda _: None
        )
    with pytest.raises(RequestError, match="the guide cannot be compiled"):
        guide_after_reasoning(
            GuidedDecodingParams(TYPES.EBNF_GRAMMAR, 'root ::= "'), REASONING_FORMS["qwen3"], "", lambda _: None
        )


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = [GuidedFunction("w", CITY, True, "tools[0].function")]


def test_calls_are_enforced_after_the_reasoning() -> None:
    call = '<tool_call>\n{"name": "w", "arguments": {"city": "a"}}\n</tool_call>'
    thoughts = '<think>I write <tool_call>{"name": "x"}.</think>\n\n'
    options: dict[str, Any] = {"is_single": False, "content": None, "special": lambda _: None}
    qwen = {"form": FORMS["hermes"], "functions": STRICT, "reasoning": REASONING_FORMS["qwen3"], **options}
    forced = tool_guide(is_forced=True, opened="", **qwen)
    assert accepts(forced, call)
    assert accepts(forced, thoughts + call)
    assert not accepts(forced, thoughts + "Hello")
    free = tool_guide(is_forced=False, opened="", **qwen)
    for right in ("", "Hello <think>", "\n" + thoughts, thoughts + "Hello " + call, "Hello" + call + call + "."):
        assert accepts(free, right), right
    for wrong in ("<think>" + call, thoughts + call.replace("city", "town"), "Hello" + call.replace("city", "town")):
        assert not accepts(free, wrong), wrong
    begun = tool_guide(is_forced=False, opened="<think>", **qwen)
    assert accepts(begun, thoughts.removeprefix("<think>") + "Hello " + call)
    assert not accepts(begun, thoughts.removeprefix("<think>") + call.replace("city", "town"))


def test_calls_of_harmony_are_enforced() -> None:
    def call(arguments: str, name: str = "w") -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"

    options: dict[str, Any] = {"is_single": False, "special": lambda _: None, "opened": ""}
    harmony = {"form": FORMS[OPENAI], "functions": STRICT, "reasoning": REASONING_FORMS[HARMONY], **options}
    good, thoughts = call('{"city": "a"}'), f"{ANALYSIS}hm{NEXT}"
    for content, text in ((None, "Hello"), (json.dumps({"type": "integer"}), "5")):
        free = tool_guide(is_forced=False, content=content, **harmony)
        preamble = f"<|channel|>commentary<|message|>Wait.{NEXT}"
        for right in (good, thoughts + good, thoughts + preamble + good, FINAL + text, thoughts + FINAL + text):
            assert accepts(free, right), right
        for wrong in (call("{}"), call('{"city": "a"}', "x"), "Hello", thoughts):
            assert not accepts(free, wrong), wrong
    forced = tool_guide(is_forced=True, content=None, **harmony)
    assert accepts(forced, thoughts + good)
    assert accepts(forced, good.replace(" <|constrain|>json", ""))
    assert not accepts(forced, FINAL + "Hello")
    answer = splitter_of(HARMONY)
    assert joined([*answer.add(thoughts + good.replace(".w", ".search")), *answer.finish()]) == Answer(
        "", "hm", [("search", {"city": "a"})], "rc"
    )


def test_marks_that_are_special_tokens_are_written_as_tokens() -> None:
    for form in REASONING_FORMS.values():
        numbers = {mark: 1000 + i for i, mark in enumerate(form.marks)}
        guide = guide_after_reasoning(GuidedDecodingParams(TYPES.JSON), form, "", numbers.get)
        assert not [mark for mark in form.marks if f'"{mark}"' in (guide.guide or "")]
        assert "<[1000]>" in (guide.guide or "")


MARKED = {
    "qwen": ("{{ message.content.split('</think>')[-1] }}", "qwen3"),
    "open": ("<think>", "qwen3"),
    "mistral": ("[THINK]{{ thinking }}[/THINK]", "mistral"),
    "granite 3.2": ("Write your thoughts after 'Here is my thought process:'", "granite"),
    "granite 3.3": ("between <think></think> and write your response between <response></response>", "granite"),
    "harmony": ("<|start|>assistant<|channel|>final<|message|>", HARMONY),
    "seed": ("{%- set think_begin_token = '<seed:think>' -%}", "seed_oss"),
    "none": ("{{ messages }}", None),
}


@pytest.mark.parametrize(("template", "form"), MARKED.values(), ids=MARKED)
def test_a_template_shows_its_form(template: str, form: str | None) -> None:
    assert reasoning_of_template(template) == form


def test_every_alias_and_marker_is_a_form() -> None:
    assert set(REASONING_ALIASES.values()) | {form for form, _ in REASONING_MARKERS} <= set(REASONING_FORMS)
    assert not set(REASONING_ALIASES) & set(REASONING_FORMS)


@pytest.mark.parametrize("calls", FORMS)
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_tokenizer_with_special_tokens_can_reason_and_call(calls: str, is_forced: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([*FORMS[calls].marks, "<think>", "</think>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    reasoning = REASONING_FORMS[HARMONY if calls == OPENAI else "qwen3"]
    functions = [*STRICT, GuidedFunction("all", None, True, "tools[1].function")]
    options: dict[str, Any] = {"content": None, "special": Vocabulary(tokenizer).special_id, "reasoning": reasoning}
    guide = tool_guide(FORMS[calls], functions, is_forced=is_forced, is_single=False, **options)
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(fast), llguidance.grammar_from("grammar", guide.guide))
    assert not matcher.is_error(), matcher.get_error()
    if calls == OPENAI:
        thoughts = f"{ANALYSIS}hm{NEXT}"
        call = '<|channel|>commentary to=functions.w <|constrain|>json<|message|>{"city": "a"}'
    else:
        thoughts, call = "<think>hm</think>\n", WRITERS[calls]([("w", {"city": "a"}), ("all", {})])
    bad = call.replace("city", "town")
    for text, right in ((call, True), (thoughts + call, True), (bad, False), (thoughts + bad, False)):
        matcher.reset()
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == right, text
