"""Conversations become prompts with the current template of the model or adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt import RequestError
from adaptrt.runtime.named_adapter import NamedAdapter
from adaptrt.runtime.template_limits import TemplateLimits
from adaptrt.runtime.text_bound import LONG_TEXT
from adaptrt.serve import prompts as prompts_module
from adaptrt.serve.errors import ApiError
from adaptrt.serve.media_hosts import MediaHosts
from adaptrt.serve.openai_chat_fields import TemplateFields
from adaptrt.serve.prompts import _OF_MESSAGE, Prompts, _length, _template_message
from adaptrt.serve.work import WorkKind

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Adapters:
    """The part of the adapter store that Prompts uses."""

    def __init__(self) -> None:
        self.named: dict[str, NamedAdapter] = {}

    def find(self, name: str) -> NamedAdapter:
        return self.named[name]

    def add(self, name: str, directory: Path, task_id: int, template: str | None) -> None:
        directory.mkdir(exist_ok=True)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        self.named[name] = NamedAdapter(name, task_id, directory, "")


class Surroundings:
    """Objects that Prompts needs. A prompt's only token is its text."""

    def __init__(self, directory: Path) -> None:
        self.adapters = Adapters()
        self.num_reads = self.num_renderings = 0
        self.kinds: list[WorkKind] = []
        engine = SimpleNamespace(directory=directory)
        self.executor = SimpleNamespace(
            adapters=self.adapters, engine=engine, engine_info=SimpleNamespace(max_input_len=99, max_seq_len=99)
        )

    @property
    def work(self) -> Surroundings:
        return self

    async def run(self, kind: WorkKind, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.kinds.append(kind)
        self.num_reads += function.__name__ == "load"
        self.num_renderings += function.__name__ == "_rendered"
        return function(*args, **kwargs)

    async def of(self, _adapter: str | None) -> Any:
        def encode(text: Any, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(ids=[text])

        return SimpleNamespace(encode=encode, check_length=lambda *_: None)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Prompts, Surroundings]:
    monkeypatch.setattr(prompts_module, "max_prompt_tokens", lambda _: 99)
    (tmp_path / "chat_template.jinja").write_text("base")
    surroundings = Surroundings(tmp_path)
    return Prompts(surroundings, surroundings, options(), SimpleNamespace()), surroundings


def options(**fields: Any) -> Any:
    limits = SimpleNamespace(template=TemplateLimits(max_characters=99), max_tokenize_tokens=200)
    usual = {
        "chat_template": None,
        "trust_request_chat_template": False,
        "media_hosts": MediaHosts(),
        "media_root": None,
    }
    return SimpleNamespace(**{"limits": limits, **usual, **fields})


def test_a_request_brings_its_template_if_the_server_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "max_prompt_tokens", lambda _: 99)
    monkeypatch.setattr(prompts_module, "MAX_REQUEST_TEMPLATES", 2)
    surroundings = Surroundings(tmp_path)
    fields = TemplateFields.model_validate({"messages": [{"role": "user", "content": "x"}], "chat_template": "own"})
    prompts = Prompts(surroundings, surroundings, options(chat_template="given"), SimpleNamespace())
    assert written(prompts, None) == "given"
    with pytest.raises(ApiError, match="without --trust-request-chat-template") as refused:
        asyncio.run(prompts.tokenize_chat(fields, None, None))
    assert refused.value.param == "chat_template"
    prompts = Prompts(surroundings, surroundings, options(trust_request_chat_template=True), SimpleNamespace())
    assert asyncio.run(prompts.tokenize_chat(fields, None, None)).ids == ["own"]
    made = asyncio.run(prompts.template_for(fields, None))
    assert asyncio.run(prompts.template_for(fields, None)) is made
    for text in ("a", "b"):
        asyncio.run(prompts.template_for(fields.model_copy(update={"chat_template": text}), None))
    assert asyncio.run(prompts.template_for(fields, None)) is not made
    with pytest.raises(ApiError, match="chat_template: cannot be used") as refused:
        asyncio.run(prompts.template_for(fields.model_copy(update={"chat_template": "{{"}), None))
    assert refused.value.param == "chat_template"


def written(prompts: Prompts, adapter: str | None) -> Any:
    fields = TemplateFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    (text,) = asyncio.run(prompts.tokenize_chat(fields, adapter, None)).ids
    return text


def test_a_template_is_read_again_when_its_adapter_is_replaced(
    made: tuple[Prompts, Surroundings], tmp_path: Path
) -> None:
    prompts, surroundings = made
    adapters = surroundings.adapters
    adapters.add("poet", tmp_path / "first", 1, "first")
    assert [written(prompts, "poet"), written(prompts, "poet"), written(prompts, None)] == ["first", "first", "base"]
    assert surroundings.num_reads == 1
    adapters.add("poet", tmp_path / "second", 2, "second")
    assert written(prompts, "poet") == "second"
    adapters.add("poet", tmp_path / "second", 3, "third")  # in the same directory
    assert written(prompts, "poet") == "third"
    adapters.add("poet", tmp_path / "none", 4, None)
    assert written(prompts, "poet") == "base"
    assert surroundings.num_reads == 4


def test_templates_of_adapters_have_the_limits(made: tuple[Prompts, Surroundings], tmp_path: Path) -> None:
    prompts, surroundings = made
    surroundings.adapters.add("poet", tmp_path / "poet", 1, "{{ 'x' * 100 }}")
    with pytest.raises(RequestError, match="value of 100 characters or items; at most 99"):
        written(prompts, "poet")


@pytest.mark.parametrize(
    ("messages", "runs"),
    [
        ([{"role": "user", "content": "x"}], 0),
        ([{"role": "user", "content": "x"}] * 200, 1),
        ([{"role": "user", "content": "x" * 20000}], 1),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 200}], 1),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": '["' + "x" * 20000 + '"]'}}],
                }
            ],
            1,
        ),
        ([{"role": "assistant", "content": "x", "reasoning_content": "x" * 20000}], 1),
    ],
)
def test_long_conversations_are_written_beside_the_loop(
    messages: list[dict[str, Any]], runs: int, made: tuple[Prompts, Surroundings]
) -> None:
    prompts, surroundings = made
    fields = TemplateFields.model_validate({"messages": messages})
    asyncio.run(prompts.tokenize_chat(fields, None, None))
    assert surroundings.num_renderings == runs


@pytest.mark.parametrize(
    ("message", "num_characters", "num_parts"),
    [
        ({"role": "user", "content": "xyz"}, 3, 1),
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, 3, 1),
        ({"role": "user", "content": [{"type": "text", "text": "xyz"}, {"type": "text", "text": "x"}]}, 4, 3),
        ({"role": "assistant", "content": "x", "tool_calls": [CALL, CALL]}, 5, 3),
    ],
)
def test_each_part_of_a_message_counts_as_many_characters(
    message: dict[str, Any], num_characters: int, num_parts: int
) -> None:
    fields = TemplateFields.model_validate({"messages": [message]})
    assert _length(fields.messages[0]) == num_characters + num_parts * _OF_MESSAGE


@pytest.mark.parametrize(("more", "runs"), [(0, 0), (1, 1)])
def test_the_limit_of_short_conversations_is_exact(more: int, runs: int, made: tuple[Prompts, Surroundings]) -> None:
    prompts, surroundings = made
    content = "x" * (LONG_TEXT - _OF_MESSAGE + more)
    fields = TemplateFields.model_validate({"messages": [{"role": "user", "content": content}]})
    asyncio.run(prompts.tokenize_chat(fields, None, None))
    assert surroundings.num_renderings == runs


@pytest.mark.parametrize(("more", "kinds"), [(0, []), (1, [WorkKind.TEXTS])])
def test_longer_texts_are_tokenised_beside_the_loop(
    more: int, kinds: list[WorkKind], made: tuple[Prompts, Surroundings]
) -> None:
    prompts, surroundings = made
    text = "x" * (LONG_TEXT + more)
    assert asyncio.run(prompts.tokenize(text, None, add_special_tokens=True, param="prompt")) == [text]
    assert surroundings.kinds == kinds


def test_a_bounded_number_of_templates_is_kept(
    made: tuple[Prompts, Surroundings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "MAX_TEMPLATES", 2)
    prompts, surroundings = made
    for number, name in enumerate(["a", "b", "c"]):
        surroundings.adapters.add(name, tmp_path / name, number, name)
    assert [written(prompts, name) for name in ("a", "b", "b", "c", "a")] == ["a", "b", "b", "c", "a"]
    assert surroundings.num_reads == 4


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": "n"}, {"role": "user", "content": "x", "name": "n"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "annotations": []},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        (
            {"role": "assistant", "content": "x", "reasoning": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
        (
            {"role": "tool", "content": "x", "tool_call_id": "1"},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ),
    ],
)
def test_a_template_is_given_what_says_something_to_the_model(
    message: dict[str, Any], expected: dict[str, Any]
) -> None:
    fields = TemplateFields.model_validate({"messages": [message]})
    assert _template_message(fields.messages[0]) == expected
