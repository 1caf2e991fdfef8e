"""Budgets for reasoning: the guide that forces its end, and what is said if there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptrt import GuidedDecodingParams, RequestError
from adaptrt.runtime.guide_trial_process import _Vocabulary
from adaptrt.runtime.guided_decoding import token_bytes
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.answer_form import AnswerForm, answer_form_of
from adaptrt.serve.errors import ApiError
from adaptrt.serve.openai_chat_fields import ChatRequest
from adaptrt.serve.thinking_budget import end_of_tokens
from adaptrt.serve.tools.reasoning import Budget
from support.tokenizers import byte_level

MARKS = {
    "qwen3": ("{# <think> </think> <tool_call> #}", "<think>", "</think>"),
    "mistral": ("{# [THINK] <tool_call> #}", "[THINK]", "[/THINK]"),
    "openai_gptoss": (
        "{# <|channel|> <|message|> #}",
        "<|channel|>analysis<|message|>",
        "<|end|>",
    ),
}
NEXT = {"openai_gptoss": "<|start|>assistant<|channel|>final<|message|>"}
SPECIAL = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>", "<|end|>")
SPECIAL_MARKS = (*SPECIAL, "[THINK]", "[/THINK]")
TOOL: Any = {"type": "function", "function": {"name": "w", "strict": True, "parameters": {"properties": {}}}}
CALL = '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>'
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.w <|constrain|>json<|message|>{}"


class Server:
    """A server with a template and a tokenizer of bytes and marks."""

    def __init__(self, template: str, *, has_marks: bool = True, is_installed: bool = True) -> None:
        self.tokenizer = byte_level()
        if has_marks:
            self.tokenizer.add_special_tokens(list(SPECIAL_MARKS))
            self.tokenizer.add_tokens(["<think>", "</think>", "done</think>", "</think>x"])
        self.template = template
        self.is_installed = is_installed
        end = self.tokenizer.token_to_id("</s>")
        tokens = token_bytes(self.tokenizer, self.tokenizer.get_vocab_size(), [end])
        self.ll = llguidance.LLTokenizer(_Vocabulary(tokens, [end]), n_vocab=len(tokens), eos_token=[end])
        own = SimpleNamespace(vocabulary=Vocabulary(self.tokenizer), end_ids=(end,))

        async def run(_: Any, work: Callable[..., Any], *arguments: Any) -> Any:
            return work(*arguments)

        async def tokenizer_of(adapter: str | None) -> Any:
            return own

        async def template_for(fields: ChatRequest, adapter: str | None) -> Any:
            return SimpleNamespace(text=lambda *, with_tools: self.template)

        self.service: Any = SimpleNamespace(
            options=SimpleNamespace(tool_call_parser="auto", reasoning_parser="auto"),
            tokenizers=SimpleNamespace(of=tokenizer_of),
            prompts=SimpleNamespace(template_for=template_for),
            executor=SimpleNamespace(compile_guide=self.compile_guide, work=SimpleNamespace(run=run)),
        )

    async def compile_guide(self, guide: GuidedDecodingParams) -> None:
        if not self.is_installed:
            raise ApiError("guided decoding needs llguidance")

    def form(self, prompt_end: str = "", *, is_budget_target: bool = False, **fields: Any) -> AnswerForm:
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
        return asyncio.run(
            answer_form_of(self.service, chat, None, prompt_end, max_tokens=100, is_budget_target=is_budget_target)
        )

    def accepts(self, form: AnswerForm, text: str, *, is_whole: bool = True) -> bool:
        """True if the guide lets a model write the text, and end there if it is whole."""
        assert form.guide is not None
        matcher = llguidance.LLMatcher(self.ll, llguidance.grammar_from("grammar", form.guide.guide))
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or not is_whole))


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("is_opened", [False, True])
@pytest.mark.parametrize("kind", ["text", "schema", "tools", "required"])
def test_reasoning_ends_when_the_budget_is_spent(name: str, is_opened: bool, kind: str) -> None:
    template, begin, end = MARKS[name]
    server = Server(template)
    fields: dict[str, Any] = {
        "text": {},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}},
        "tools": {"tools": [TOOL]},
        "required": {"tools": [TOOL], "tool_choice": "required"},
    }[kind]
    is_harmony = name == "openai_gptoss"
    prompt_end = ("<|start|>assistant" if is_harmony else "\n") + begin if is_opened else ""
    form = server.form(prompt_end, thinking_token_budget=3, **fields)
    call = HARMONY_CALL if is_harmony else CALL
    answer = call if kind in ("tools", "required") else NEXT.get(name, "") + ("5" if kind == "schema" else "Hi")
    first = "" if is_opened else begin
    for thoughts in ("", "a", "abc", "a\nb"):
        assert server.accepts(form, f"{first}{thoughts}{end}{answer}"), thoughts
    assert not server.accepts(form, f"{first}abcd", is_whole=False)
    assert not server.accepts(form, f"{first}abc</s>", is_whole=False)
    if kind in ("schema", "required"):
        assert not server.accepts(form, f"{first}abc{end}")
    if kind != "text":
        assert not server.accepts(form, f"{first}abc{end}{answer.replace('5', '6').replace('{}', '[]')}")
    if not is_opened:
        # The model may answer without reasoning.
        assert server.accepts(form, answer.removeprefix("<|start|>assistant"))
    none = server.form(prompt_end, thinking_token_budget=0, **fields)
    assert server.accepts(none, f"{first}{end}{answer}")
    assert not server.accepts(none, f"{first}a", is_whole=False)


def test_harmony_has_one_message_of_reasoning_and_any_preambles() -> None:
    server = Server(MARKS["openai_gptoss"][0])
    form = server.form(thinking_token_budget=3)
    thoughts = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hi"
    for right in (final, thoughts + final, preamble + thoughts + preamble + preamble + final):
        assert server.accepts(form, right), right
    assert not server.accepts(form, thoughts + thoughts, is_whole=False)
    continued = server.form("<|start|>assistant<|channel|>final<|message|>", thinking_token_budget=3)
    assert server.accepts(continued, "Hi")


def test_a_token_that_ends_with_the_mark_ends_the_reasoning() -> None:
    server = Server(MARKS["qwen3"][0])
    form = server.form("<think>", thinking_token_budget=3)
    assert server.accepts(form, "abcdone</think>Hi")
    assert not server.accepts(form, "</think>x", is_whole=False)


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": -1}, {"thinking_token_budget": 100}])
def test_no_guide_without_a_budget_that_matters(fields: dict[str, Any]) -> None:
    assert Server(MARKS["qwen3"][0]).form("<think>", **fields).guide is None


@pytest.mark.parametrize("trigger", ["<a", "[THINK]"])
def test_a_structural_tag_may_follow_limited_reasoning(trigger: str) -> None:
    begin = f"{trigger}>"
    structures = [{"begin": begin, "schema": {"type": "integer"}, "end": "!"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": [trigger]}
    server = Server(MARKS["qwen3"][0])
    for prompt_end, first in (("", "<think>"), ("<think>", "")):
        form = server.form(prompt_end, thinking_token_budget=3, response_format=tag)
        for right in ("Hi", f"Hi {begin}5! {begin}6!.", f"{begin}5!"):
            assert server.accepts(form, f"{first}abc</think>{right}"), right
        assert not server.accepts(form, f"{first}abcd", is_whole=False)
        assert not server.accepts(form, f"{first}abc</think>Hi {begin}x", is_whole=False)
        assert not server.accepts(form, f"{first}abc</think>{begin}5!{begin}x", is_whole=False)
    assert server.accepts(server.form(thinking_token_budget=3, response_format=tag), f"Hi{begin}5!")


@pytest.mark.parametrize(
    ("structures", "said"),
    [
        (3, "not a structural tag"),
        ([], "structures of the guide is empty"),
        ([{"begin": 3, "schema": {}, "end": "!"}], r"begin and end of structures\[0\]"),
        ([{"begin": "b", "schema": {}, "end": "!"}], "none of the triggers"),
        ([{"begin": "a", "schema": "{", "end": "!"}], "not JSON"),
    ],
)
def test_an_invalid_structural_tag_is_refused(structures: Any, said: str) -> None:
    tag = json.dumps({"structures": structures, "triggers": ["a", 3]})
    with pytest.raises((ApiError, RequestError), match=said):
        Server(MARKS["qwen3"][0]).form(thinking_token_budget=3, structured_outputs={"structural_tag": tag})


@pytest.mark.parametrize(
    ("server", "fields", "said"),
    [
        (("{{ messages }}",), {}, "neither the chat template nor --reasoning-parser shows how the model reasons"),
    ],
)
def test_a_budget_that_cannot_be_kept(server: Any, fields: dict[str, Any], said: str) -> None:
    template, has_marks = server if len(server) == 2 else (server[0], True)
    served = Server(template, has_marks=has_marks)
    with pytest.raises(ApiError, match=said):
        served.form(thinking_token_budget=3, **fields)
    # Anthropic's budgets are targets.
    ignored = served.form(is_budget_target=True, thinking_token_budget=3, **fields)
    plain = served.form(**fields)
    assert (ignored.guide and ignored.guide.guide) == (plain.guide and plain.guide.guide)


def test_a_target_is_ignored_without_llguidance_and_kept_with_it() -> None:
    for is_installed in (True, False):
        server = Server(MARKS["qwen3"][0], is_installed=is_installed)
        form = server.form("<think>", is_budget_target=True, thinking_token_budget=3)
        assert (form.guide is not None) == is_installed


GRANITE = "{# Here is my thought process: #}"


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        (MARKS["qwen3"][0], "<think>", "</think>"),
        (GRANITE, "Here is my thought process:", "Here is my response:"),
        (GRANITE, "<think>", "</think>"),
    ],
)
def test_the_end_of_reasoning_may_take_several_tokens(template: str, begin: str, end: str) -> None:
    server = Server(template, has_marks=False)
    form = server.form(thinking_token_budget=3, response_format={"type": "json_object"})
    for thoughts in ("", "a", "abc", f"a{end[0]}b", f"a{end[:-1]}b", f"{end[:2]}{end[:3]}ab"):
        assert server.accepts(form, f"{begin}{thoughts}{end}{{}}"), thoughts
    for wrong in ("abcd", f"abcd{end[0]}", f"abc{end[0]}a", f"abc{end[:-1]}a"):
        assert not server.accepts(form, f"{begin}{wrong}", is_whole=False), wrong
    assert not server.accepts(form, f"{begin}abc{end}x", is_whole=False)
    assert server.accepts(form, "{}")
    none = server.form(thinking_token_budget=0, response_format={"type": "json_object"})
    assert server.accepts(none, f"{begin}{end}{{}}")
    assert not server.accepts(none, f"{begin}a", is_whole=False)


PIECES = [b"<", b"/", b"th", b"ink", b">", b"</", b"think>", b"k>x", b"a", b"<<", b"a</th", b"</think", b">>"]


@given(words=st.lists(st.integers(0, len(PIECES) - 1), max_size=9))
@settings(max_examples=200, deadline=None)
def test_reasoning_ends_where_its_text_ends(words: list[int]) -> None:
    mark = "</think>"
    made = end_of_tokens(mark, dict(enumerate(PIECES)))
    assert made is not None
    rules = Budget(9, {mark: made}).rule("spent", mark)
    vocabulary = [*PIECES, b"\xff</s>"]
    end = len(PIECES)
    tokens = llguidance.LLTokenizer(_Vocabulary(vocabulary, [end]), n_vocab=len(vocabulary), eos_token=[end])
    matcher = llguidance.LLMatcher(tokens, llguidance.grammar_from("grammar", f"start: spent\n{rules}\n"))
    assert not matcher.is_error(), matcher.get_error()
    is_accepted = matcher.try_consume_tokens(words) == len(words) and matcher.is_accepting()
    text = b"".join(PIECES[word] for word in words).decode()
    assume(text.count("<") <= 3)  # more beginnings at once are not allowed
    assert is_accepted == (text.find(mark) == len(text) - len(mark) >= 0)


def test_an_end_that_no_tokens_make_is_refused() -> None:
    assert end_of_tokens("</think>", {0: b"<", 1: b"/think"}) is None
