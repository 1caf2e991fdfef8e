"""Finds the message format that a chat template reads, by rendering short conversations with it.

OpenAI's messages express some things in two ways: a content is a text or a list of parts, and the arguments of a call
are a JSON text, whereas most templates expect an object. A template reads one of them, or both, and otherwise prints
something else, nothing or an error. Its source rarely tells which, because contents pass through variables and macros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from .._core import RequestError
from ..common.json_fields import describe

Renderer: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], "str | None"]
"""Renders a conversation; None: the template fails on it."""

# Words that no template contains. Lower case and letters only, so that filters such as `title` keep them.
_FIRST: Final = "adaptrtfirstprobe"
_SECOND: Final = "adaptrtsecondprobe"
_KEY: Final = "adaptrtkeyprobe"
_CALL_ID: Final = "abcdefgh1"
"""An id of a call. Mistral's templates require nine letters and digits."""
SAMPLE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
"""A tool, for templates that write calls only if there are tools."""


@dataclass(frozen=True)
class ContentForms:
    """Formats of contents that a template reads in messages of one role."""

    text: bool
    parts: bool
    """True: it reads a list of any number of text parts."""
    one_part: bool
    """True: it reads a list with one text part."""

    def convert(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        """Returns the content in a format that the template reads, unchanged if possible.

        Raises RequestError for images if the template reads no parts.
        """
        if isinstance(content, list):
            if self.parts:
                return content
            if any(part["type"] != "text" for part in content):
                raise RequestError("the chat template reads no lists of parts, which images need; expected only texts")
            content = "\n".join(part["text"] for part in content)
        return [{"type": "text", "text": content}] if self.one_part and not self.text else content


class MessageForms:
    """Message formats that one template reads, each found when the first message needs it."""

    def __init__(self, render: Renderer) -> None:
        """render: returns None if the template fails, or raises to end the search."""
        self._render = render
        self._contents: dict[str, ContentForms] = {}
        self._text_arguments: bool | None = None
        self._null: Mapping[str, Any] | None = None

    def apply(self, message: dict[str, Any], subject: str) -> None:
        """Converts a message to the format that the template reads. subject: names the message in errors.

        Raises RequestError for arguments that are not JSON if the template needs an object.
        """
        if "content" in message and message["content"] is None:
            del message["content"]
            message.update(self._null_content())
        elif isinstance(content := message.get("content"), (str, list)):
            message["content"] = self._content_forms(message["role"]).convert(content)
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), (str, dict)):
                where = f"{subject}.tool_calls[{number}].function.arguments"
                function["arguments"] = self._arguments(function["arguments"], where)

    def _content_forms(self, role: str) -> ContentForms:
        if role not in ("system", "user", "assistant", "tool"):
            role = "user"
        if role not in self._contents:
            self._contents[role] = self._find_content_forms(role)
        return self._contents[role]

    def _find_content_forms(self, role: str) -> ContentForms:
        def reads(content: str | list[dict[str, str]], *words: str) -> bool:
            written = self._render(self._conversation(role, content))
            if written is None or _KEY in written:  # the key appears if the template prints the list itself
                return False
            return all(word in written.casefold() for word in words)

        first, second = ({"type": "text", "text": word, _KEY: ""} for word in (_FIRST, _SECOND))
        text, parts = reads(_FIRST, _FIRST), reads([first, second], _FIRST, _SECOND)
        one_part = parts or reads([first], _FIRST)
        if role == "tool" and not (text or one_part):
            return self._content_forms("user")
        return ContentForms(text, parts, one_part)

    def _conversation(self, role: str, content: Any) -> list[dict[str, Any]]:
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        if role == "system":
            return [message, self._question()]
        if role == "assistant":
            return [self._question(), message]
        call = self._call(self._arguments({}, "arguments"))
        answer = {"role": "assistant", "content": self._empty(), "tool_calls": [call]}
        return [self._question(), answer, message | {"tool_call_id": _CALL_ID, "name": "f"}]

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": self._content_forms("user").convert("q")}

    def _empty(self) -> str | list[dict[str, str]]:
        """Returns an assistant's content without text."""
        return self._content_forms("assistant").convert("")

    def _null_content(self) -> Mapping[str, Any]:
        """Returns the fields that stand for a null content: null, no field, an empty text or an empty part."""
        if self._null is None:
            question = self._question()
            call = self._call(self._arguments({}, "arguments"))

            def number_of_nones(fields: Mapping[str, Any]) -> float:
                written = self._render([question, {"role": "assistant", **fields, "tool_calls": [call]}])
                return float("inf") if written is None else written.count("None")

            forms: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": ""}, {"content": self._empty()})
            self._null = min(forms, key=number_of_nones)  # the first of the best
        return self._null

    def _arguments(self, arguments: str | dict[str, Any], where: str) -> str | dict[str, Any]:
        if isinstance(arguments, str) and not arguments.strip():
            arguments = {}  # several clients write a call without arguments like this
        if self._text_arguments is None:
            self._text_arguments = self._find_text_arguments()
        if self._text_arguments:
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return arguments
        try:
            parsed: dict[str, Any] = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is {describe(arguments)}, not JSON: {error}") from None
        return parsed

    def _find_text_arguments(self) -> bool:
        """True if the template reads a JSON text and no object. transformers' documentation asks for an object."""
        question = self._question()
        arguments = {_KEY: _FIRST}

        def written(form: str | dict[str, str], content: Any) -> str:
            answer = {"role": "assistant", "content": content, "tool_calls": [self._call(form)]}
            return self._render([question, answer]) or ""

        # DeepSeek's templates write calls only in messages whose content is null.
        contents = (None, self._empty())
        as_objects = [written(arguments, content) for content in contents]
        if any(_FIRST in text and f"'{_KEY}':" not in text for text in as_objects):
            return False
        as_text = json.dumps(arguments)
        return any(as_text in written(as_text, content) for content in contents)

    @staticmethod
    def _call(arguments: str | dict[str, Any]) -> dict[str, Any]:
        return {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
