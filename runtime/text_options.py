"""Keyword arguments that LLM's methods share, for type checkers; LLM.generate() and LLM.chat() describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .._core import GuidedDecodingParams, SamplingConfig


class TextOptions(TypedDict, total=False):
    """Options of a completion."""

    max_tokens: int | None
    sampling_config: SamplingConfig | None
    stop: str | Sequence[str]
    guided_decoding_params: GuidedDecodingParams | None


class ChatOptions(TextOptions, total=False):
    """Options of an answer to a conversation."""

    tools: Sequence[Mapping[str, Any]] | None
    template_variables: Mapping[str, Any] | None


class VllmOptions(TypedDict, total=False):
    """vLLM's arguments of generate()."""

    lora_request: Any
    use_tqdm: bool
    priority: int | None
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None


class VllmChatOptions(VllmOptions, total=False):
    """vLLM's arguments of chat()."""

    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: None
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool


class GenerateOptions(TextOptions, VllmOptions, total=False):
    """Options of generate()."""


class AnswerOptions(ChatOptions, VllmChatOptions, total=False):
    """Options of chat()."""
