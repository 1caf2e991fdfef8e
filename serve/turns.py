"""Collects the messages of a conversation that other APIs write as items or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .openai_chat_fields import CalledFunction, ImagePart, ImageUrl, Message, ToolCall

ASSISTANT: Final = "assistant"
THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off: Qwen3's and GLM's, and that of Granite and DeepSeek."""


class Turns:
    """Messages of a conversation. Reasoning, text and calls of one assistant's turn become one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._text: list[str] | None = None
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        """Adds a message of another role; ends the assistant's turn."""
        self._end_turn()
        self._messages.append(message)

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning of the assistant before its text."""
        if self._text is not None or self._calls:
            self._end_turn()
        self._reasoning.append(text)

    def add_text(self, texts: Sequence[str]) -> None:
        """Adds an assistant's text in one or more parts."""
        if self._calls or self._text is not None:
            self._end_turn()
        self._text = list(texts)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a function call. arguments: a JSON text."""
        self._calls.append(ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments)))

    def finish(self) -> list[Message]:
        """Returns all messages."""
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        if not self._reasoning and self._text is None and not self._calls:
            return
        message = Message(
            role=ASSISTANT,
            content=None if self._text is None and self._calls else content_of(self._text or [""]),
            tool_calls=self._calls or None,
            reasoning_content="\n".join(self._reasoning) if self._reasoning else None,
        )
        self._messages.append(message)
        self._reasoning, self._text, self._calls = [], None, []


def content_of(parts: Sequence[str | ImagePart]) -> Any:
    """Returns a message's content as in a body: a text if it is the only part, or a list of parts."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        {"type": "text", "text": part} if isinstance(part, str) else part.model_dump(exclude_none=True)
        for part in parts
    ]


def image_of_base64(data: str, media_type: str = "image/*") -> ImagePart:
    """Returns a part with an image's file. The file's content decides its format, whatever media_type says."""
    return image_of_url(f"data:{media_type};base64,{data}")


def image_of_url(url: str) -> ImagePart:
    """Returns a part with an image."""
    return ImagePart(type="image_url", image_url=ImageUrl(url=url))
