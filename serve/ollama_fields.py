"""Bodies of Ollama's routes that generate or embed, and their translation to chats and completions."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX, MAX_LOG_PROBS
from .ollama_options import OllamaOptions
from .openai_chat_fields import CalledFunction, ChatRequest, Message, Tool, ToolCall
from .openai_fields import CompletionRequest, Fields, FiniteObject, never, only
from .turns import ASSISTANT, THINKING_VARIABLES, content_of, image_of_base64

_LATEST: Final = ":latest"
"""Tag that Ollama's clients add to names without one."""
_DURATION: Final = re.compile(r"-?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|-?\d+(?:\.\d*)?")
_ZERO: Final = re.compile(r"-?(?:0+(?:\.0*)?(?:ns|us|µs|ms|s|m|h)?)+")
_JSON: Final = "json"
_NO_IMAGES: Final = "the model makes no images"


def plain_name(name: str) -> str:
    """Returns a model's name without the tag `latest`."""
    return name.removesuffix(_LATEST)


def _keep_alive(value: Any) -> Any:
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise ValueError(f"is {shown(value)}; expected a number of seconds, or a duration such as '5m'")


def _format(value: Any) -> Any:
    if value in ("", _JSON) or isinstance(value, dict):
        return value
    raise ValueError(f"is {shown(value)}; expected 'json', a JSON schema, or ''")


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) and value else [] if value == "" else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


ModelName = Annotated[str, Field(min_length=1)]
KeepAlive = Annotated[float | str, PlainValidator(_keep_alive)]
Think = bool | Literal["low", "medium", "high", "max"]


class NamedModel(Fields):
    """Bodies that name a model in one of two fields."""

    model: ModelName | None = None
    name: ModelName | None = None
    """The older name of model."""

    @model_validator(mode="after")
    def _names_one_model(self) -> NamedModel:
        if self.model is None and self.name is None:
            raise ValueError("model is not given; expected the name of a model")
        if None not in (self.model, self.name) and self.model != self.name:
            raise ValueError("model and name are given, and they differ; expected one of them")
        return self

    @property
    def asked(self) -> str:
        """Name of the model."""
        name = self.model or self.name
        assert name is not None
        return name


class OllamaCalledFunction(Fields):
    """A function that the assistant called."""

    index: int = 0
    """No effect: calls have the order of the list."""
    name: Annotated[str, Field(min_length=1)]
    arguments: FiniteObject = Field(default_factory=dict)


class OllamaCall(Fields):
    """A call in an assistant's message."""

    id: str = ""
    function: OllamaCalledFunction


class OllamaMessage(Fields):
    """One message of the conversation."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str = ""
    thinking: str | None = None
    images: list[str] = Field(default_factory=list)
    """Files of images in base64. They stand before the text."""
    tool_calls: list[OllamaCall] = Field(default_factory=list)
    tool_name: str | None = None
    """Name of the function whose result the message has."""
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _of_its_role(self) -> OllamaMessage:
        owners = {"thinking": ASSISTANT, "tool_calls": ASSISTANT, "tool_name": "tool", "tool_call_id": "tool"}
        for name, role in owners.items():
            if getattr(self, name) and self.role != role:
                raise ValueError(f"{name} is given with role '{self.role}'; expected it with role '{role}' only")
        return self


class OllamaFields(Fields):
    """Shared fields of all requests that run the model."""

    model: ModelName
    """An adapter's name or the base model's, with or without the tag `latest`."""
    keep_alive: KeepAlive | None = None
    """No effect: the model stays loaded. 0 without a prompt asks to unload it, which is refused."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)

    @property
    def unloads(self) -> bool:
        """True if keep_alive is 0."""
        return self.keep_alive is not None and _ZERO.fullmatch(str(self.keep_alive)) is not None


class OllamaGenerationFields(OllamaFields):
    """Shared fields of chats and prompts."""

    stream: bool = True
    format: Annotated[dict[str, Any] | str, PlainValidator(_format)] = ""
    """The form of the answer: 'json' for any object, or a JSON schema."""
    think: Think | None = None
    """Turns reasoning on or off, or says how much; None: the model decides."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] = 0
    truncate: Annotated[bool, only(False, "a prompt that does not fit is refused")] = False
    shift: Annotated[bool, only(False, "an answer ends where the context ends")] = False


class OllamaChatRequest(OllamaGenerationFields):
    """Body of POST /api/chat."""

    messages: list[OllamaMessage] = Field(default_factory=list)
    """Without messages, the model is only loaded."""
    tools: list[Tool] = Field(default_factory=list)


class OllamaGenerateRequest(OllamaGenerationFields):
    """Body of POST /api/generate."""

    prompt: str = ""
    """Without a prompt, the model is only loaded."""
    system: str = ""
    raw: bool = False
    """True: the prompt is not written by the chat template."""
    suffix: str = ""
    """Text that follows the answer. Needs a template with `.Suffix`."""
    template: str = ""
    """A Go template to use instead of the model's. Needs --trust-request-chat-template on the server."""
    context: Annotated[list[Any], only([], "give the conversation to /api/chat")] = Field(default_factory=list)
    images: list[str] = Field(default_factory=list)
    """Files of images in base64, which stand before the prompt."""
    width: Annotated[int | None, never(_NO_IMAGES)] = None
    height: Annotated[int | None, never(_NO_IMAGES)] = None
    steps: Annotated[int | None, never(_NO_IMAGES)] = None

    @model_validator(mode="after")
    def _one_way(self) -> OllamaGenerateRequest:
        for name in ("system", "think", "template", "suffix", "images"):
            if self.raw and getattr(self, name):
                raise ValueError(f"raw is true with {name}; expected one of them: no template writes the prompt")
        return self


class OllamaEmbedRequest(OllamaFields):
    """Body of POST /api/embed. Its options are checked and change nothing."""

    input: Annotated[list[str], BeforeValidator(_texts)]
    truncate: bool = True
    """True: a text that is too long loses its end. False: it is refused."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of first dimensions to return. Needs --cut-embeddings on the server."""


class OllamaEmbeddingsRequest(OllamaFields):
    """Body of POST /api/embeddings, the older route for one text. Its options are checked and change nothing."""

    prompt: str = ""


@dataclass(frozen=True)
class Preset:
    """Values for requests to a model, in addition to their own fields."""

    adapter: str | None = None
    """The adapter that answers; None: the base model."""
    template: str | None = None
    """Jinja that replaces the model's template; None: the model's own."""
    system: str = ""
    messages: tuple[OllamaMessage, ...] = ()


def chat_of(fields: OllamaChatRequest, preset: Preset) -> ChatRequest:
    """Translates a chat. Raises pydantic's ValidationError."""
    last = fields.messages[-1]
    is_continued = last.role == ASSISTANT and not last.tool_calls
    given = [*preset.messages, *fields.messages]
    system = "" if given[0].role == "system" else preset.system
    return ChatRequest.model_validate(
        {
            **_chat_fields(fields, preset),
            "messages": [*_system(system), *_messages(given)],
            "tools": fields.tools or None,
            # A last message of the assistant is the beginning of the answer.
            "add_generation_prompt": not is_continued,
            "continue_final_message": is_continued,
        }
    )


def chat_of_prompt(fields: OllamaGenerateRequest, preset: Preset) -> ChatRequest:
    """Translates a prompt that the chat template writes. Raises like chat_of()."""
    chat = _chat_fields(fields, preset)
    if fields.suffix:
        chat["chat_template_kwargs"] = {**chat["chat_template_kwargs"], "suffix": fields.suffix}
    messages = [*_system(fields.system or preset.system), *_messages(preset.messages)]
    messages.append(Message(role="user", content=_content(fields.prompt, fields.images)))
    return ChatRequest.model_validate({**chat, "messages": messages})


def completion_of(fields: OllamaGenerateRequest, preset: Preset) -> CompletionRequest:
    """Translates a prompt that no template writes. Raises like chat_of()."""
    top = {"logprobs": fields.top_logprobs} if fields.logprobs else {}
    return CompletionRequest.model_validate({**_shared(fields, preset), "prompt": fields.prompt, **top})


def _chat_fields(fields: OllamaGenerationFields, preset: Preset) -> dict[str, Any]:
    variables = {} if fields.think is None else dict.fromkeys(THINKING_VARIABLES, bool(fields.think))
    return {
        **_shared(fields, preset),
        "chat_template": preset.template,
        "chat_template_kwargs": variables,
        "reasoning_effort": fields.think if isinstance(fields.think, str) else None,
        "logprobs": fields.logprobs,
        "top_logprobs": fields.top_logprobs if fields.logprobs else 0,
        "max_completion_tokens": fields.options.answer_tokens,
    }


def _shared(fields: OllamaGenerationFields, preset: Preset) -> dict[str, Any]:
    return {
        **fields.options.sampling(),
        "model": preset.adapter,
        "stream": fields.stream,
        "response_format": _response_format(fields.format),
    }


def _system(text: str) -> list[Message]:
    return [Message(role="system", content=text)] if text else []


def _response_format(form: dict[str, Any] | str) -> dict[str, Any] | None:
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    return {"type": "json_object"} if form == _JSON else None


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """Translates messages. Calls and results without ids get ids, which some templates need."""
    messages = []
    waiting: deque[tuple[str, str]] = deque()
    """Name and id of each call that has no result yet."""
    num_calls = 0
    for message in given:
        content = _content(message.content, message.images)
        if message.role == "tool":
            call_id = message.tool_call_id or _taken(waiting, message.tool_name)
            messages.append(Message(role="tool", content=content, name=message.tool_name, tool_call_id=call_id))
            continue
        calls = []
        for call in message.tool_calls:
            num_calls += 1
            # Mistral's templates require nine letters and digits.
            call_id = call.id or f"call{num_calls:05d}"
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(id=call_id, function=CalledFunction(name=call.function.name, arguments=arguments)))
            waiting.append((call.function.name, call_id))
        messages.append(
            Message(
                role=message.role,
                content=None if calls and not message.content and not message.images else content,
                tool_calls=calls or None,
                reasoning_content=message.thinking or None,
            )
        )
    return messages


def _content(text: str, images: Sequence[str]) -> Any:
    """Returns a message's content: its images, and then its text."""
    return content_of([*map(image_of_base64, images), *([text] if text or not images else [])])


def _taken(waiting: deque[tuple[str, str]], name: str | None) -> str | None:
    """Takes the id of the first call that waits for a result; only of this function if the result names one."""
    for call in waiting:
        if name in (None, call[0]):
            waiting.remove(call)
            return call[1]
    return None
