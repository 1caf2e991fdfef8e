"""The options that type checkers see are the parameters of LLM's methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from adaptrt import LLM
from adaptrt.runtime.text_options import ChatOptions, TextOptions, VllmChatOptions, VllmOptions
from support.vllm_names import names_of


@pytest.mark.parametrize(
    ("method", "options", "others"),
    [
        (LLM.generate, TextOptions, {"self", "prompts", "sampling_params", "lora", "n", "progress", "vllm_arguments"}),
        (LLM.stream, TextOptions, {"self", "prompt", "sampling_params", "lora"}),
        (LLM.generate_async, TextOptions, {"self", "prompt", "sampling_params", "lora", "streaming"}),
        (LLM.chat, ChatOptions, {"self", "messages", "sampling_params", "lora", "n", "progress", "vllm_arguments"}),
        (LLM.chat_stream, ChatOptions, {"self", "messages", "sampling_params", "lora"}),
    ],
)
def test_options_are_parameters(method: Callable[..., Any], options: type[Any], others: set[str]) -> None:
    assert set(inspect.signature(method).parameters) == options.__annotations__.keys() | others


@pytest.mark.parametrize(("name", "options"), [("generate", VllmOptions), ("chat", VllmChatOptions)])
def test_type_checkers_see_vllms_arguments(name: str, options: type[Any]) -> None:
    own = inspect.signature(getattr(LLM, name)).parameters.keys()
    assert set(names_of(f"LLM.{name}")) - own == options.__annotations__.keys()
