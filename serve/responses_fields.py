"""Body of POST /v1/responses, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX, MAX_LOG_PROBS
from .openai_chat_fields import ALLOWED_TOOLS, ChatRequest, ImagePart, Message, NoAnnotations
from .openai_fields import (
    Fields,
    FiniteObject,
    Metadata,
    ReceiptFields,
    SamplingFields,
    check_types,
    never,
    only,
    parts_of,
    sampling_values,
    type_of,
)
from .responses_answer import item_id
from .turns import ASSISTANT, Turns, content_of, image_of_url

LOG_PROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
_NAMED: Final = {"type": "function", "name": "NAME"}


_IMAGE: Final = "input_image"
_KINDS: Final = ("input_text", "output_text", "text", _IMAGE)


def _content_parts(value: Any) -> Any:
    """Returns a text as one part. Names the first part that cannot be used; the declared type checks the rest."""
    return parts_of(value, _KINDS, "input_text")


class InputText(Fields):
    """A text part of a message, or of a function's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NoAnnotations = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)
    """No effect: a field of answers, which clients send back."""


class InputImage(Fields):
    """An image in a message, or in a function's result."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    """No effect: the model's image processor decides how many tokens an image has."""
    file_id: Annotated[str | None, never("images are not stored; give image_url")] = None


ContentPart: TypeAlias = Annotated[InputText | InputImage, Field(discriminator="type")]
Content: TypeAlias = Annotated[list[ContentPart], BeforeValidator(_content_parts)]


class Item(Fields):
    """Base of input items. id and status come from answers that clients send back; they have no effect."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = None
    """No effect."""

    @model_validator(mode="after")
    def _assistants_write_text(self) -> MessageItem:
        for i, part in enumerate(self.content):
            if self.role == ASSISTANT and isinstance(part, InputImage):
                raise ValueError(f"content[{i}] of role '{ASSISTANT}' is of type '{_IMAGE}'; expected a text")
        return self


class CallItem(Item):
    """A function call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class CallOutputItem(Item):
    """A function's result."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    """No effect: call_id names the call."""


class ReasoningText(Fields):
    """A part of the assistant's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    """The assistant's reasoning. The template gets its content, or else its summary."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: Annotated[str, never("reasoning is not encrypted here; send the item's content")] | None = None


_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")


def _known_items(value: Any) -> Any:
    """Returns a text as the user's message. Names the first item of another type; the declared types check the rest."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value:
        check_types(value, _ITEMS, _type_of_item)
        return value
    raise ValueError(f"is {shown(value)}; accepted: a text, or a list of one item or more")


def _type_of_item(value: Any) -> Any:
    """Returns the type of an item. Only messages may lack it."""
    given = type_of(value)
    return "message" if given is None and isinstance(value, dict) else given


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of_item),
]


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: FiniteObject | None = None
    strict: bool = False
    defer_loading: Annotated[bool, only(False, "all tools are in the prompt")] = False

    def of_chat(self) -> dict[str, Any]:
        """Returns the tool in the format of chats, with the fields that the client set."""
        return {"type": "function", "function": self.model_dump(exclude_unset=True, exclude={"type", "defer_loading"})}


def _known_tools(value: Any) -> Any:
    if isinstance(value, list):
        check_types(value, ("function",), reason=", because the server runs no tools itself")
    return value


def _tool_choice(value: Any) -> Any:
    """Returns the choice in the format of chats."""
    if value in ("none", "auto", "required"):
        return value
    if _is_named(value):
        return {"type": "function", "function": {"name": value["name"]}}
    if isinstance(value, dict) and value.get("type") == ALLOWED_TOOLS:
        return _allowed_tools(value)
    raise ValueError(
        f"is {shown(value)}; expected 'none', 'auto', 'required' or {_NAMED}, or an object of type '{ALLOWED_TOOLS}'"
    )


def _allowed_tools(value: dict[str, Any]) -> Any:
    """Returns a choice that lists functions in the format of chats."""
    tools: Any = value.get("tools")
    is_list = isinstance(tools, list) and bool(tools) and all(_is_named(tool) for tool in tools)
    if is_list and set(value) == {"type", "mode", "tools"} and value["mode"] in ("auto", "required"):
        functions = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
        return {"type": ALLOWED_TOOLS, ALLOWED_TOOLS: {"mode": value["mode"], "tools": functions}}
    expected = {"type": ALLOWED_TOOLS, "mode": "auto", "tools": [_NAMED]}
    raise ValueError(f"is {shown(value)}; expected {expected}, or the mode 'required'")


def _is_named(value: Any) -> bool:
    is_function = isinstance(value, dict) and set(value) == {"type", "name"} and value["type"] == "function"
    return is_function and isinstance(value["name"], str)


def tool_choice_echo(choice: Any) -> Any:
    """Returns a choice in the format of chats as responses repeat it."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] != ALLOWED_TOOLS:
        return {"type": choice["type"], **choice["function"]}
    allowed = choice[ALLOWED_TOOLS]
    tools = [{"type": tool["type"], **tool["function"]} for tool in allowed["tools"]]
    return {"type": ALLOWED_TOOLS, "mode": allowed["mode"], "tools": tools}


class TextFormat(Fields):
    """The format that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[FiniteObject | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None
    """Both values have the same effect: answers always match the schema."""

    @model_validator(mode="after")
    def _one_form(self) -> TextFormat:
        given = self.model_fields_set - {"type"}
        if self.type != "json_schema" and given:
            raise ValueError(f"type '{self.type}' has {sorted(given)}; accepted: []")
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' has no schema; expected a JSON schema")
        return self

    def of_chat(self) -> dict[str, Any]:
        """Returns the format of chats."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextConfig(Fields):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str, only("medium", "the model decides how much it writes")] = "medium"


class ReasoningConfig(Fields):
    """Options of the model's reasoning."""

    effort: Annotated[str, Field(min_length=1)] | None = None
    """Becomes the template's variable reasoning_effort."""
    summary: Annotated[str, only("auto", "reasoning is shown, not summarised")] | None = None
    generate_summary: Annotated[str, only("auto", "reasoning is shown, not summarised")] | None = None
    """Older name of summary."""


class ResponseStreamOptions(Fields):
    """Options of a stream."""

    include_obfuscation: Annotated[bool, only(False, "events are not padded")] = False


def _include(value: Any) -> Any:
    for i, name in enumerate(value if isinstance(value, list) else ()):
        if name not in (LOG_PROBS, ENCRYPTED_REASONING):
            raise ValueError(f"[{i}] is {shown(name)}; accepted: '{LOG_PROBS}', '{ENCRYPTED_REASONING}'")
    return value


class ResponseRequest(SamplingFields, ReceiptFields):
    """Body of POST /v1/responses."""

    input: Annotated[list[InputItem], BeforeValidator(_known_items)]
    instructions: str | None = None
    """The first system message. Not carried over to responses that name this one as the previous one."""
    previous_response_id: Annotated[str, Field(min_length=1)] | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(_known_tools)] = Field(default_factory=list)
    tool_choice: Annotated[Any, PlainValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    """False: an answer has at most one call."""
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] = 0
    include: Annotated[list[str], BeforeValidator(_include)] = Field(default_factory=list)
    """reasoning.encrypted_content has no effect: reasoning items have their text, which clients can send back."""
    store: bool | None = None
    """True: the response is kept for other requests. None: the same if the server stores responses at all."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional variables for the template."""
    metadata: Metadata = Field(default_factory=dict)
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    """No effect; the same holds for the next three fields and max_tool_calls."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Limits calls of tools that the server runs itself; there are none."""
    prompt_cache_retention: Annotated[str, only("in_memory", "prompts are kept in memory")] = "in_memory"
    truncation: Annotated[str, only("disabled", "items are not dropped from long conversations")] = "disabled"
    background: Annotated[bool, only(False, "a response is generated while its client waits")] = False
    conversation: Annotated[Any, never("conversations are not stored; give previous_response_id")] = None
    prompt: Annotated[Any, never("prompts are not stored; give instructions and input")] = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.top_logprobs and not self.has_log_probs:
            raise ValueError(f"top_logprobs is given, but include has no '{LOG_PROBS}'")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is false")
        names = [tool.name for tool in self.tools]
        for place, name in self._chosen_names():
            if name not in names:
                raise ValueError(f"{place} is {shown(name)}; expected one of {shown(names)}")
        return self

    def _chosen_names(self) -> list[tuple[str, str]]:
        """Returns the functions that tool_choice names, with their places."""
        choice = tool_choice_echo(self.tool_choice)
        if not isinstance(choice, dict):
            return []
        if "name" in choice:
            return [("tool_choice.name", choice["name"])]
        return [(f"tool_choice.tools[{i}].name", tool["name"]) for i, tool in enumerate(choice["tools"])]

    @property
    def has_log_probs(self) -> bool:
        """True if the answer's text has log probs."""
        return LOG_PROBS in self.include


def chat_of(fields: ResponseRequest, history: Sequence[Message]) -> ChatRequest:
    """Translates a request to a chat. history: messages of the previous responses.

    Raises pydantic's ValidationError for fields that contradict each other.
    """
    messages = [Message(role="system", content=fields.instructions)] if fields.instructions is not None else []
    content: dict[str, Any] = {
        **sampling_values(fields),
        "messages": [*messages, *history, *messages_of(fields.input)],
        "chat_template_kwargs": fields.chat_template_kwargs,
        "tools": [tool.of_chat() for tool in fields.tools] or None,
        "tool_choice": fields.tool_choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_completion_tokens": fields.max_output_tokens,
        "reasoning_effort": fields.reasoning.effort,
        "response_format": None if fields.text.format is None else fields.text.format.of_chat(),
        "logprobs": fields.has_log_probs,
        "top_logprobs": fields.top_logprobs,
        **{name: getattr(fields, name) for name in ReceiptFields.model_fields},
    }
    return ChatRequest.model_validate(content)


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """Translates input items to the messages of a chat."""
    turns = Turns()
    for item in items:
        if isinstance(item, ReasoningItem):
            turns.add_reasoning("\n".join(part.text for part in item.content or item.summary))
        elif isinstance(item, CallItem):
            turns.add_call(item.call_id, item.name, item.arguments)
        elif isinstance(item, CallOutputItem):
            turns.add(Message(role="tool", tool_call_id=item.call_id, content=content_of(_parts(item.output))))
        elif item.role == ASSISTANT:
            turns.add_text([part.text for part in item.content if isinstance(part, InputText)])
        else:
            turns.add(Message(role=item.role, content=content_of(_parts(item.content))))
    return turns.finish()


def listed(item: InputItem) -> dict[str, Any]:
    """Returns an input item in the form in which clients can list it, with an id."""
    fields = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == ASSISTANT else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == ASSISTANT else {}
        fields["content"] = [_listed_part(part, kind, more) for part in item.content]
    elif isinstance(item, CallOutputItem):
        fields["output"] = [_listed_part(part, "input_text", {}) for part in item.output]
    return {"id": item_id(item.type), "status": "completed", **fields}


def _listed_part(part: InputText | InputImage, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    """kind, more: type and other fields of a text."""
    if isinstance(part, InputImage):
        return {"type": _IMAGE, "image_url": part.image_url, "detail": part.detail or "auto"}
    return {"type": kind, "text": part.text, **more}


def _parts(content: Sequence[InputText | InputImage]) -> list[str | ImagePart]:
    return [part.text if isinstance(part, InputText) else image_of_url(part.image_url) for part in content]
