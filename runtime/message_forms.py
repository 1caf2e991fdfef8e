"""The forms in which a chat template reads messages, found by rendering short conversations with it.

OpenAI's messages say some things in two ways: a content is a text or a list of parts, and the arguments of a call are
a JSON text where templates mostly expect an object. A template reads one of them, or both, and prints something else,
nothing at all or an error for the other. Its text rarely tells which: contents go through variables and macros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from .._core import RequestError
from ..common.json_fields import describe

Renderer: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], "str | None"]
"""Writes a conversation; None: the template fails with it."""

# Words that no template has by itself. Lower case and letters only, so that a filter such as `title` leaves them.
_FIRST: Final = "adaptrtfirstprobe"
_SECOND: Final = "adaptrtsecondprobe"
_KEY: Final = "adaptrtkeyprobe"
_CALL_ID: Final = "abcdefgh1"
"""Mistral's templates require nine letters and digits."""
SAMPLE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
"""For templates that write calls only if there are tools."""


@dataclass(frozen=True)
class ContentForms:
    """The contents that a template reads in messages with one role."""

    text: bool
    parts: bool
    """A list of any number of text parts."""
    one_part: bool
    """A list with one text part."""

    def convert(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        """The same content in a form that the template reads: the given one if possible."""
        if isinstance(content, list):
            if self.parts:
                return content
            content = "\n".join(part["text"] for part in content)
        return [{"type": "text", "text": content}] if self.one_part and not self.text else content


class MessageForms:
    """The forms that one template reads, each found when the first message needs it."""

    def __init__(self, render: Renderer) -> None:
        """`render` may raise what ends the search; it returns None if the template fails otherwise."""
        self._render = render
        self._contents: dict[str, ContentForms] = {}
        self._text_arguments: bool | None = None
        self._null: Mapping[str, Any] | None = None

    def apply(self, message: dict[str, Any], subject: str) -> None:
        """Gives a message the forms that the template reads. `subject` names it in errors.

        Raises RequestError for arguments that are not JSON, if the template needs an object.
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
            if written is None or _KEY in written:  # a key of a part is there if the list is printed as it is
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
        """An assistant's content without text."""
        return self._content_forms("assistant").convert("")

    def _null_content(self) -> Mapping[str, Any]:
        """The fields that stand for a content that is null: null, none at all, an empty text or an empty part."""
        if self._null is None:
            question = self._question()
            call = self._call(self._arguments({}, "arguments"))

            def number_of_nones(fields: Mapping[str, Any]) -> float:
                written = self._render([question, {"role": "assistant", **fields, "tool_calls": [call]}])
                return float("inf") if written is None else written.count("None")

            forms: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": ""}, {"content": self._empty()})
            self._null = min(forms, key=number_of_nones)  # the first one of the best
        return self._null

    def _arguments(self, arguments: str | dict[str, Any], where: str) -> str | dict[str, Any]:
        if isinstance(arguments, str) and not arguments.strip():
            arguments = {}  # several clients write a call without arguments so
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
        """True if the template reads a JSON text and no object, which transformers' documents ask for."""
        question = self._question()
        arguments = {_KEY: _FIRST}

        def written(form: str | dict[str, str], content: Any) -> str:
            answer = {"role": "assistant", "content": content, "tool_calls": [self._call(form)]}
            return self._render([question, answer]) or ""

        # DeepSeek's templates write calls of messages whose content is null only.
        contents = (None, self._empty())
        as_objects = [written(arguments, content) for content in contents]
        if any(_FIRST in text and f"'{_KEY}':" not in text for text in as_objects):
            return False
        as_text = json.dumps(arguments)
        return any(as_text in written(as_text, content) for content in contents)

    @staticmethod
    def _call(arguments: str | dict[str, Any]) -> dict[str, Any]:
        return {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
