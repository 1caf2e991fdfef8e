"""Budgets for reasoning: the guide that forces its end, and what is said if there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest

from adaptrt import GuidedDecodingParams, RequestError
from adaptrt.runtime.guide_trial_process import _Vocabulary
from adaptrt.runtime.guided_decoding import token_bytes
from adaptrt.runtime.vocabulary import Vocabulary
from adaptrt.serve.answer_form import AnswerForm, answer_form_of
from adaptrt.serve.errors import ApiError
from adaptrt.serve.openai_chat_fields import ChatRequest
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
        (("{{ messages }}",), {}, "neither the chat template nor --reasoning_parser shows how the model reasons"),
        (("{# Here is my thought process: #}",), {}, "'Here is my response:', which is not one token"),
        ((MARKS["qwen3"][0], False), {}, "'</think>', which is not one token of its tokenizer"),
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
