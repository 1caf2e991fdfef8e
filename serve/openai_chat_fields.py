"""Bodies of OpenAI's routes that hold a conversation. See openai_fields.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX, MAX_LOG_PROBS
from .openai_fields import Fields, GenerationFields, ModelFields, only, parts_of

NoAnnotations = Annotated[list[Any], only([], "texts have no annotations")]
"""Field of OpenAI's answers, which clients send back."""


def _content_parts(value: Any) -> Any:
    """Names the first part of a message that cannot be used. The declared type checks the rest."""
    return value if isinstance(value, str) else parts_of(value, ("text", "image_url"), "text")


class CacheControl(Fields):
    """Anthropic's cache hint, which clients add to parts, messages and tools. No effect: prompts are cached anyway."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None


class TextPart(Fields):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    annotations: NoAnnotations = Field(default_factory=list)


class ImageUrl(Fields):
    """An image of a part."""

    url: str
    """data:image/png;base64,..."""
    detail: Literal["auto", "low", "high"] | None = None
    """No effect: the model's image processor decides how many tokens an image has."""


class ImagePart(Fields):
    """A part of a message's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheControl | None = None


class CalledFunction(Fields):
    """A function that the assistant called, with its arguments as a JSON text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: Annotated[str | list[TextPart | ImagePart], BeforeValidator(_content_parts)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning before its answer, for templates that show it."""
    reasoning: str | None = None
    """vLLM's newer name of reasoning_content."""
    annotations: NoAnnotations = Field(default_factory=list)
    cache_control: CacheControl | None = None

    @property
    def text_parts(self) -> list[str]:
        """Texts of the content, without its images."""
        if self.content is None or isinstance(self.content, str):
            return [self.content or ""]
        return [part.text for part in self.content if isinstance(part, TextPart)]

    @property
    def image_urls(self) -> list[str]:
        """URLs of the content's images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @model_validator(mode="after")
    def _thinks_once(self) -> Message:
        given = [name for name in ("reasoning_content", "reasoning") if getattr(self, name) is not None]
        if given and self.role != "assistant":
            raise ValueError(
                f"a message with role '{self.role}' has {given[0]}; only an assistant's message may have it"
            )
        if len(given) == 2 and self.reasoning != self.reasoning_content:
            raise ValueError("reasoning_content and reasoning are given, and they differ; expected one of them")
        return self

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"a message with role '{self.role}' has tool_calls; only an assistant's message may have it"
            )
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message with role '{self.role}' has no content")
        return self


class Function(Fields):
    """A function that the model may call, with its parameters as a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    """True: the arguments of a call must match the parameters."""


class Tool(Fields):
    """A tool of the request."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the fields that the client set and that matter to the model."""
        return self.model_dump(exclude_unset=True, exclude={"cache_control"})


class TemplateFields(Fields):
    """A conversation and how it becomes a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional variables for the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True: the answer continues the last message. Not with add_generation_prompt."""
    add_special_tokens: bool = False
    """True: adds special tokens to those that the template writes."""
    documents: list[dict[str, str]] | None = None
    """Documents for templates of retrieval-augmented generation, by convention with `title` and `text`."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Template to use instead of the model's. Needs --trust-request-chat-template on the server."""

    @model_validator(mode="after")
    def _one_end(self) -> TemplateFields:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt are both true; accepted: one of them"
                )
            if not self.messages or self.messages[-1].role != "assistant":
                raise ValueError("continue_final_message is true, but the last message is not the assistant's")
        return self


ALLOWED_TOOLS: Final = "allowed_tools"
"""Type of a tool_choice that lists the functions that may be called."""
_NAMED: Final = {"type": "function", "function": {"name": "NAME"}}


@dataclass(frozen=True)
class ToolChoice:
    """The functions that an answer may or must call."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    """The only function to call, with mode "required"; None: any of them."""
    allowed: tuple[str, ...] | None = None
    """The functions of the request that may be called; None: all of them."""

    def can_call(self, name: str) -> bool:
        """True if the answer may call a function of the request."""
        return self.mode != "none" and self.name in (None, name) and (self.allowed is None or name in self.allowed)


def _tool_choice(value: Any) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if (name := _named_function(value)) is not None:
        return ToolChoice("required", name)
    if isinstance(value, dict) and value.get("type") == ALLOWED_TOOLS:
        return _allowed_tools(value)
    raise ValueError(
        f"is {shown(value)}; expected 'none', 'auto', 'required' or {_NAMED}, or an object of type '{ALLOWED_TOOLS}'"
    )


def _named_function(value: Any) -> str | None:
    """Returns the name in {"type": "function", "function": {"name": ...}}; None: the value has another form."""
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return function["name"]
    return None


def _allowed_tools(value: dict[str, Any]) -> ToolChoice:
    form = value.get(ALLOWED_TOOLS)
    if set(value) == {"type", ALLOWED_TOOLS} and isinstance(form, dict) and set(form) == {"mode", "tools"}:
        mode, tools = form["mode"], form["tools"]
        if mode in ("auto", "required") and isinstance(tools, list) and tools:
            names = [_named_function(tool) for tool in tools]
            if all(name is not None for name in names):
                return ToolChoice(mode, allowed=tuple(name for name in names if name is not None))
    expected = {"type": ALLOWED_TOOLS, ALLOWED_TOOLS: {"mode": "auto", "tools": [_NAMED]}}
    raise ValueError(f"is {shown(value)}; expected {expected}, or the mode 'required'")


class ChatRequest(GenerationFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """OpenAI's older name of max_completion_tokens. Without both, an answer may fill the rest of the context."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] = 0
    tool_choice: Annotated[ToolChoice, PlainValidator(_tool_choice)] = ToolChoice("auto")
    parallel_tool_calls: bool = True
    """False: an answer has at most one call."""
    reasoning_effort: Annotated[str, Field(min_length=1)] | None = None
    """Becomes the template variable of this name. Many templates ignore it."""
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Maximum number of tokens of the reasoning; -1 and None: no maximum."""
    modalities: Annotated[list[str], only(["text"], "answers are texts")] = Field(default_factory=lambda: ["text"])
    verbosity: Annotated[str, only("medium", "the model decides how much it writes")] = "medium"
    mm_processor_kwargs: Annotated[dict[str, Any], only({}, "the model reads only text")] = Field(default_factory=dict)
    echo: bool = False
    """True: the answer's text begins with the last message if that is the assistant's."""
    include_reasoning: bool = True
    """False: the answer leaves the reasoning out."""

    @model_validator(mode="after")
    def _callable(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        for i, name in enumerate(self.tool_choice.allowed or ()):
            if name not in names:
                place = f"tool_choice.{ALLOWED_TOOLS}.tools[{i}].function.name"
                raise ValueError(f"{place} is {shown(name)}; expected one of {shown(names)}")
        if self.tool_choice.mode != "required":
            return self
        if not names:
            raise ValueError("tool_choice asks for a call, but tools is empty; expected one or more tools")
        if self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise ValueError(
                f"tool_choice.function.name is {shown(self.tool_choice.name)}; expected one of {shown(names)}"
            )
        return self

    @model_validator(mode="after")
    def _one_effort(self) -> ChatRequest:
        name = "reasoning_effort"
        if self.reasoning_effort is not None:
            if self.chat_template_kwargs.get(name, self.reasoning_effort) != self.reasoning_effort:
                raise ValueError(f"{name} and chat_template_kwargs.{name} differ; expected one of them")
            self.chat_template_kwargs = {**self.chat_template_kwargs, name: self.reasoning_effort}
        return self

    @model_validator(mode="after")
    def _lengths(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one"
            )
        if self.answer_tokens is not None and self.min_tokens > self.answer_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; expected at most max_completion_tokens, {self.answer_tokens}"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is false")
        return self

    @property
    def called_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        return [] if self.tool_choice.mode == "none" else self.tools or []

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Maximum number of tokens of the reasoning; None: no maximum."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def answer_tokens(self) -> int | None:
        """Maximum number of tokens in the answer; None: the rest of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TokenizeRequest(ModelFields, TemplateFields):
    """Body of POST /tokenize: a text or a conversation."""

    messages: list[Message] = Field(default_factory=list)
    prompt: str | None = None
    return_token_strs: bool = False
    content: str | None = None
    """llama.cpp's name of the text; with it, the answer has llama.cpp's form. The next three fields belong to it."""
    add_special: bool = False
    """True: adds the tokenizer's special tokens."""
    parse_special: Annotated[bool, only(True, "special tokens in a text are tokens")] = True
    with_pieces: bool = False
    """True: the answer has the tokens' texts."""

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        texts = {
            "prompt": self.prompt is not None,
            "messages": bool(self.messages),
            "content": self.content is not None,
        }
        given = [name for name, is_given in texts.items() if is_given]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(
                f"expected one of prompt, a text, messages, a list that is not empty, or content; {said} given"
            )
        with_content = {"add_special", "parse_special", "with_pieces"} & self.model_fields_set
        if with_content and self.content is None:
            raise ValueError(f"{sorted(with_content)[0]} is given without content; expected both, or neither")
        with_others = {"return_token_strs", "add_special_tokens"} & self.model_fields_set
        if with_others and self.content is not None:
            raise ValueError(f"{sorted(with_others)[0]} is given with content; expected prompt or messages")
        return self

    @property
    def adds_special_tokens_to_text(self) -> bool:
        """True: special tokens are added to a text. The default is true for texts and false for conversations, whose
        templates write them.
        """
        return self.add_special_tokens or "add_special_tokens" not in self.model_fields_set
