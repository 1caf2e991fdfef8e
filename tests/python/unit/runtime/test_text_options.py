"""The options that type checkers see are the parameters of LLM's methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from adaptrt import LLM
from adaptrt.runtime.text_options import ChatOptions, TextOptions


@pytest.mark.parametrize(
    ("method", "options", "others"),
    [
        (LLM.generate, TextOptions, {"self", "prompts", "sampling_params", "lora", "n", "progress"}),
        (LLM.stream, TextOptions, {"self", "prompt", "sampling_params", "lora"}),
        (LLM.generate_async, TextOptions, {"self", "prompt", "sampling_params", "lora", "streaming"}),
        (LLM.chat, ChatOptions, {"self", "messages", "sampling_params", "lora", "n", "progress"}),
        (LLM.chat_stream, ChatOptions, {"self", "messages", "sampling_params", "lora"}),
    ],
)
def test_options_are_parameters(method: Callable[..., Any], options: type[Any], others: set[str]) -> None:
    assert set(inspect.signature(method).parameters) == options.__annotations__.keys() | others
