"""Bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens, and their translation to a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX
from .openai_chat_fields import CacheControl, ChatRequest, ImagePart, Message
from .openai_fields import (
    Fields,
    FiniteObject,
    ReceiptFields,
    SamplingFields,
    Stops,
    check_types,
    only,
    parts_of,
    sampling_values,
    type_of,
)
from .turns import ASSISTANT, THINKING_VARIABLES, Turns, content_of, image_of_base64, image_of_url

_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "user": ("text", "image", "tool_result"),
    ASSISTANT: ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks by the role of their message."""


class TextBlock(Fields):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], only([], "texts have no citations")] = Field(default_factory=list)
    cache_control: CacheControl | None = None


Texts: TypeAlias = Annotated[
    list[TextBlock], BeforeValidator(lambda value: parts_of(value, ("text",), "text", "blocks"))
]


class Base64Image(Fields):
    """An image's file."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlImage(Fields):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ImageBlock(Fields):
    """An image of the user, or of a tool's result."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Field(discriminator="type")]
    cache_control: CacheControl | None = None

    def of_chat(self) -> ImagePart:
        """Returns the image as a part of a chat's message."""
        if isinstance(self.source, UrlImage):
            return image_of_url(self.source.url)
        return image_of_base64(self.source.data, self.source.media_type)


ResultContent: TypeAlias = Annotated[
    list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
    BeforeValidator(lambda value: parts_of(value, ("text", "image"), "text", "blocks")),
]


class ThinkingBlock(Fields):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """No effect."""


class ToolUseBlock(Fields):
    """A call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: FiniteObject
    caller: Annotated[dict[str, Any], only({"type": "direct"}, "the model calls tools itself")] | None = None
    cache_control: CacheControl | None = None


class ToolResultBlock(Fields):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent = Field(default_factory=list)
    is_error: bool = False
    """No effect: templates have no such field, and the content says what went wrong."""
    cache_control: CacheControl | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(type_of),
]


class InputMessage(Fields):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: list[Block]

    @model_validator(mode="before")
    @classmethod
    def _content(cls, given: Any) -> Any:
        role = given.get("role") if isinstance(given, dict) else None
        if isinstance(role, str) and role in _KINDS and "content" in given:
            try:
                return {**given, "content": parts_of(given["content"], _KINDS[role], "text", "blocks")}
            except ValueError as error:
                raise ValueError(f"content of role '{role}': {error}") from None
        return given


class MessagesTool(Fields):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    """True: the input of a call must match the schema."""
    eager_input_streaming: bool | None = None
    """No effect: inputs are streamed as the model writes them."""
    defer_loading: Annotated[bool, only(False, "all tools are in the prompt")] = False
    allowed_callers: Annotated[list[str], only(["direct"], "the model calls tools itself")] = Field(
        default_factory=lambda: ["direct"]
    )
    cache_control: CacheControl | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns the tool in the format of chats."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


def _known_tools(value: Any) -> Any:
    if isinstance(value, list):
        check_types(value, ("custom",), lambda tool: type_of(tool) or "custom", ", because the server has no tools")
    return value


class MessagesToolChoice(Fields):
    """The tools that an answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False
    """True: an answer has at most one call."""

    @model_validator(mode="after")
    def _one_form(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"type '{self.type}' has name {shown(self.name)}; expected a name with type 'tool' only")
        return self

    def of_chat(self) -> Any:
        """Returns the choice in the format of chats."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Fields):
    """Turns reasoning on or off, for templates that can."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Maximum number of tokens of the reasoning. No effect if the model's reasoning cannot be limited."""
    display: Annotated[str, only("summarized", "reasoning is shown")] | None = None


class JsonFormat(Fields):
    """A format that the answer's text must have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """Options of the answer."""

    effort: Annotated[str, Field(min_length=1)] | None = None
    """Becomes the template's variable reasoning_effort."""
    format: JsonFormat | None = None


class MessagesMetadata(Fields):
    """Describes the client. No effect."""

    user_id: str | None = None


class CountRequest(SamplingFields):
    """Body of POST /v1/messages/count_tokens, and what both bodies share."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[MessagesTool], BeforeValidator(_known_tools)] = Field(default_factory=list)
    tool_choice: MessagesToolChoice = Field(default_factory=lambda: MessagesToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional variables for the template."""
    cache_control: CacheControl | None = None
    """No effect, here and in blocks and tools: prompts are cached anyway."""

    @model_validator(mode="after")
    def _consistent(self) -> CountRequest:
        last = self.messages[-1]
        if last.role == ASSISTANT and any(isinstance(block, ToolUseBlock) for block in last.content):
            raise ValueError("the last of messages is the assistant's and has 'tool_use'; expected the tool's result")
        names = [tool.name for tool in self.tools]
        name = self.tool_choice.name
        if name is not None and name not in names:
            raise ValueError(f"tool_choice.name is {shown(name)}; expected one of {shown(names)}")
        return self


class MessagesRequest(CountRequest, ReceiptFields):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    """Cut to the room that the prompt leaves in the context."""
    stop_sequences: Stops = Field(default_factory=list)
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    """No effect."""

    @model_validator(mode="after")
    def _one_stop(self) -> MessagesRequest:
        if self.stop and self.stop_sequences:
            raise ValueError("stop and stop_sequences are given; expected one of them")
        return self


def chat_of(fields: CountRequest) -> ChatRequest:
    """Translates a request to a chat. Raises pydantic's ValidationError for fields that contradict each other."""
    variables = fields.chat_template_kwargs
    if fields.thinking is not None:
        variables = dict.fromkeys(THINKING_VARIABLES, fields.thinking.type != "disabled") | variables
    form = fields.output_config.format
    choice = fields.tool_choice
    is_continued = fields.messages[-1].role == ASSISTANT
    content: dict[str, Any] = {
        **sampling_values(fields),
        "messages": _messages(fields),
        "chat_template_kwargs": variables,
        # A last message of the assistant is the beginning of the answer.
        "add_generation_prompt": not is_continued,
        "continue_final_message": is_continued,
        "tools": [tool.of_chat() for tool in fields.tools] or None,
        "tool_choice": choice.of_chat(),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": fields.output_config.effort,
        "thinking_token_budget": None if fields.thinking is None else fields.thinking.budget_tokens,
        "response_format": None
        if form is None
        else {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}},
    }
    if isinstance(fields, MessagesRequest):
        content["max_completion_tokens"] = fields.max_tokens
        content |= {name: getattr(fields, name) for name in ReceiptFields.model_fields}
        if fields.stop_sequences:
            content["stop"] = fields.stop_sequences
    return ChatRequest.model_validate(content)


def _messages(fields: CountRequest) -> list[Message]:
    turns = Turns()
    if fields.system:
        turns.add(Message(role="system", content=content_of([block.text for block in fields.system])))
    said: list[str | ImagePart] = []
    """Texts and images of consecutive messages of the user, which are one turn."""
    for message in fields.messages:
        if message.role == ASSISTANT:
            _add_user(turns, said)
            _add_assistant(turns, message)
        elif message.role == "user":
            for block in message.content:
                if isinstance(block, ToolResultBlock):
                    _add_user(turns, said)
                    content = content_of([_part(part) for part in block.content] or [""])
                    turns.add(Message(role="tool", tool_call_id=block.tool_use_id, content=content))
                elif isinstance(block, TextBlock | ImageBlock):
                    said.append(_part(block))
        else:
            _add_user(turns, said)
            texts = [block.text for block in message.content if isinstance(block, TextBlock)]
            turns.add(Message(role="system", content=content_of(texts or [""])))
    _add_user(turns, said)
    return turns.finish()


def _part(block: TextBlock | ImageBlock) -> str | ImagePart:
    return block.text if isinstance(block, TextBlock) else block.of_chat()


def _add_user(turns: Turns, said: list[str | ImagePart]) -> None:
    if said:
        turns.add(Message(role="user", content=content_of(said)))
        said.clear()


def _add_assistant(turns: Turns, message: InputMessage) -> None:
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            turns.add_text(texts)
            texts = []
        if isinstance(block, ThinkingBlock):
            turns.add_reasoning(block.thinking)
        elif isinstance(block, ToolUseBlock):
            turns.add_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    if texts:
        turns.add_text(texts)
