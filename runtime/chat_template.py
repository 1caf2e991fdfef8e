"""Chat templates: convert a conversation's messages to the text format that a model was trained on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from .._core import ConfigError, RequestError
from ..common.json_fields import describe, load_json_object
from ..common.regular_file import read_regular
from ..formats.adapter.adapter_copy import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE
from ..formats.template_files import PROCESSOR_TEMPLATE_FILE, TEMPLATE_FILE, additional_templates
from .message_forms import SAMPLE_TOOL, MessageForms
from .template_limits import DEFAULT_LIMITS, TemplateLimits

if TYPE_CHECKING:
    from .template_sandbox import CompiledTemplate

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Name of the template for requests with tools."""

IMAGE_PART: Final = {"type": "image"}
"""Part of a content that stands for an image."""
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_FILE_BYTES: Final = 1 << 26
"""Large enough for tokenizer_config.json, which lists at most some thousands of added tokens."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Fields with an assistant's reasoning. Templates read the first two."""
_REPEATS: Final = 8
_MAX_REASON: Final = 2000
"""Maximum number of characters of a template's own error."""
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """The chat templates of one model or adapter."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        source: str,
        sources: Mapping[str, str] | None = None,
        *,
        limits: TemplateLimits = DEFAULT_LIMITS,
    ) -> None:
        """Compiles `templates`, which are given by name. source: file that errors name.

        sources: files of templates that have one each. limits: limits of each rendering.

        Raises ConfigError for a template that is not valid jinja2.
        """
        self.source = source
        self.special_tokens: Final = dict(special_tokens)
        self._subjects = _subjects(templates, source, {} if sources is None else sources)
        self._templates = _compiled(templates, self._subjects, limits)
        self._texts = dict(templates)
        self._forms: dict[tuple[CompiledTemplate, bool], MessageForms] = {}

    @classmethod
    def load(
        cls, directory: str | Path, *, base: ChatTemplate | None = None, limits: TemplateLimits = DEFAULT_LIMITS
    ) -> ChatTemplate | None:
        """Loads the templates in the directory of a model, an engine or an adapter; None if it has none.

        As in transformers, chat_template.jinja and the named templates in additional_chat_templates/ take precedence
        over `chat_template` in tokenizer_config.json. base: the model's template; an adapter inherits special tokens
        that its own files do not name.

        Raises ConfigError that names the invalid file.
        """
        directory = Path(directory)
        files = {TEMPLATE_FILE: DEFAULT} if (directory / TEMPLATE_FILE).is_file() else {}
        files |= {name: Path(name).stem for name in additional_templates(directory, ConfigError)}
        if files:
            templates = {name: _read_text(directory / file) for file, name in files.items()}
            sources = {name: str(directory / file) for file, name in files.items()}
            source = directory / next(iter(files))
        else:
            # A processor's template takes precedence over its tokenizer's, as in transformers.
            of_processor = directory / PROCESSOR_TEMPLATE_FILE
            source, sources = of_processor if of_processor.is_file() else directory / TOKENIZER_CONFIG_FILE, {}
            templates = _named_templates(_read_json(source).get("chat_template"), source)
        if not templates:
            return None
        tokens = {} if base is None else base.special_tokens
        return cls(templates, tokens | special_tokens(directory), str(source), sources, limits=limits)

    @classmethod
    def of_text(
        cls, text: str, special_tokens: Mapping[str, str], *, limits: TemplateLimits = DEFAULT_LIMITS
    ) -> ChatTemplate:
        """Compiles a text that no file has; errors name it chat_template. Raises ConfigError if it is not valid."""
        return cls({DEFAULT: text}, special_tokens, "chat_template", limits=limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation. Tokenise it with add_special_tokens=False: it has the special tokens
        already.

        Messages have OpenAI's format. They are converted to the format that the template reads: contents become texts
        or lists of text parts (parts are joined with line breaks), and arguments of calls become objects or JSON texts.
        variables: the template's own, such as Qwen3's enable_thinking. A content may also have parts {"type": "image"},
        for which the template of a vision-language model writes a token.

        continue_final_message: the text ends with the last message's text. add_generation_prompt must be false then.

        Raises RequestError for messages in another format, and for messages that the template rejects or fails on.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt are both true; expected one of them")
        conversation = _conversation(messages)
        end = _EndMark(conversation[-1]) if continue_final_message else None
        given = _plain({} if variables is None else variables, "variables")
        if taken := sorted(_RESERVED & given.keys()):
            raise RequestError(f"chat template variables: {', '.join(taken)} cannot be given as a variable")
        name, template = self._choose(with_tools=bool(tools))
        forms = self._forms_of(template, with_tools=bool(tools))
        try:
            for number, message in enumerate(conversation):
                forms.apply(message, f"messages[{number}]")
            text = template.render(
                {
                    **self.special_tokens,
                    **given,
                    "messages": conversation,
                    "tools": _plain(list(tools), "tools") if tools else None,
                    "documents": _plain(list(documents), "documents") if documents else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError(f"{self._subjects[name]}: the messages cannot be rendered: {_reason(error)}") from error
        return text if end is None else end.cut(text)

    def text(self, *, with_tools: bool) -> str:
        """Returns the source of the template for conversations with or without tools. Raises RequestError without a
        template named "default".
        """
        return self._texts[self._choose(with_tools=with_tools)[0]]

    def _forms_of(self, template: CompiledTemplate, *, with_tools: bool) -> MessageForms:
        forms = self._forms.get((template, with_tools))
        if forms is None:

            def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
                tools = [SAMPLE_TOOL] if with_tools else None
                variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
                return template.try_render(self.special_tokens | variables)

            forms = self._forms[template, with_tools] = MessageForms(render)
        return forms

    def _choose(self, *, with_tools: bool) -> tuple[str, CompiledTemplate]:
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            names = ", ".join(f"'{name}'" for name in self._templates)
            raise RequestError(f"{self.source}: has no template named '{DEFAULT}'; it has: {names}")
        return name, self._templates[name]


def _subjects(templates: Mapping[str, str], source: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the beginning of each template's errors, by template name."""
    named = {name: source if name == DEFAULT else f"{source}: template '{name}'" for name in templates}
    return {**named, **sources}


def _compiled(
    templates: Mapping[str, str], subjects: Mapping[str, str], limits: TemplateLimits
) -> dict[str, CompiledTemplate]:
    # Imported here, because programs without chats need no jinja2.
    from jinja2 import TemplateError

    from .template_sandbox import ChatEnvironment, CompiledTemplate

    environment = ChatEnvironment()
    compiled = {}
    length = 0
    for name, text in templates.items():
        subject = subjects[name]
        length += len(text)
        if length > limits.max_source_characters:
            raise ConfigError(
                f"{subject}: with this template there are {length} characters of templates; expected at most "
                f"{limits.max_source_characters}"
            )
        try:
            compiled[name] = CompiledTemplate(environment, text, limits)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise ConfigError(f"{subject}: cannot be used as a chat template: {_reason(error)}") from error
    return compiled


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if line is not None else ""
    # str() of jinja2's syntax errors also has the line and the template's text. Messages may quote long values.
    return where + (getattr(error, "message", None) or str(error) or type(error).__name__)[:_MAX_REASON]


def _named_templates(value: Any, source: Path) -> dict[str, str]:
    """Returns the templates in `chat_template` of tokenizer_config.json: a text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    expected = 'expected a template, or a list of {"name", "template"} with different names'
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{source}: chat_template is {describe(value)}; {expected}")
    templates: dict[str, str] = {}
    for item in value:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str) or name in templates:
            raise ConfigError(f"{source}: chat_template has {describe(item)}; {expected}")
        templates[name] = text
    return templates


def special_tokens(directory: Path) -> dict[str, str]:
    """Returns the special tokens of a model or adapter by name, as transformers reads them.

    special_tokens_map.json takes precedence over tokenizer_config.json. It is not read if tokenizer_config.json has the
    field added_tokens_decoder.

    Raises ConfigError that names the invalid file.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    config = _read_json(path)
    tokens = _special_tokens(config, path)
    if "added_tokens_decoder" not in config:
        path = directory / SPECIAL_TOKENS_FILE
        tokens |= _special_tokens(_read_json(path), path)
    return tokens


def _special_tokens(fields: dict[str, Any], source: Path) -> dict[str, str]:
    """Returns the special tokens in a file: texts, or AddedTokens with `content`."""
    named = fields.get("extra_special_tokens")
    extra = {f"extra_special_tokens.{name}": value for name, value in named.items()} if isinstance(named, dict) else {}
    tokens = {}
    for field, value in (fields | extra).items():
        name = field.removeprefix("extra_special_tokens.")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            if field in extra or name.endswith("_token"):
                tokens[name] = text
        elif field in extra or (field in _SPECIAL_TOKENS and value is not None):
            raise ConfigError(f"{source}: {field} is {describe(value)}; expected a token's text")
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} without the file."""
    return load_json_object(path, ConfigError, max_bytes=_MAX_FILE_BYTES) if path.exists() else {}


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, _MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _conversation(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    conversation = []
    for number, message in enumerate(messages):
        subject = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{subject} is {describe(message)}; expected an object with role and content")
        fields = _plain(message, subject)
        if not isinstance(fields.get("role"), str):
            raise RequestError(f"{subject}.role is {describe(fields.get('role'))}; expected a text such as 'user'")
        if isinstance(fields.get("content"), list):
            fields["content"] = _text_parts(fields["content"], f"{subject}.content")
        if not isinstance(fields.get("tool_calls"), (list, NoneType)):
            raise RequestError(f"{subject}.tool_calls is {describe(fields['tool_calls'])}; expected a list")
        # A missing field is undefined for templates, and null is not. transformers does the same.
        fields = {name: value for name, value in fields.items() if value is not None or name == "content"}
        reasoning = [fields[name] for name in _REASONING if name in fields]
        if reasoning:
            fields = {"thinking": reasoning[0], **fields, "reasoning_content": reasoning[0]}
        conversation.append(fields)
    if not conversation:
        raise RequestError("messages is empty")
    return conversation


def _text_parts(parts: list[Any], subject: str) -> list[dict[str, str]]:
    for number, part in enumerate(parts):
        if part == IMAGE_PART:
            continue
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f'{subject}[{number}] is {describe(part)}; expected {{"type": "text", "text": ...}}')
    return [IMAGE_PART if part == IMAGE_PART else {"type": "text", "text": part["text"]} for part in parts]


class _EndMark:
    """Marks the end of the last message, to find its position in the rendered text.

    The message's text alone is not enough: templates strip and repeat it, and the same text may stand elsewhere.
    """

    def __init__(self, message: dict[str, Any]) -> None:
        """Adds the mark to a message. Raises RequestError for a message without text."""
        # Digits do not change if a template converts the case.
        self._mark = f"{secrets.randbelow(10**40):040}"
        content = message.get("content")
        last = content[-1].get("text") if content and isinstance(content, list) else content
        if not isinstance(last, str) or not last.strip():
            raise RequestError("continue_final_message is true, but the last message has no text")
        self._text = last
        # Trailing whitespace is repeated more often than any template writes it. If the rendered text lacks it, the
        # template strips its messages.
        self._space = self._text[len(self._text.rstrip()) :]
        marked = f"{self._text}{self._mark}{self._space * _REPEATS}"
        if isinstance(content, list):
            content[-1]["text"] = marked
        else:
            message["content"] = marked

    def cut(self, text: str) -> str:
        """Returns the rendered conversation without the text that the template writes after the message."""
        # All marks but the last are repetitions of the text by the template.
        written = ""
        before, *pieces = text.split(self._mark)
        for piece in pieces:
            if not before.endswith(self._text.lstrip()):
                break
            num_same = _num_same(piece, self._space * _REPEATS)
            num_kept = max(num_same - (_REPEATS - 1) * len(self._space), 0)
            written += before[: len(before) - len(self._space) + num_kept]
            before = piece[num_same:] if num_kept else piece
        else:
            if pieces:
                return written
        raise RequestError("continue_final_message is true, but the template changes the last message")


def _num_same(left: str, right: str) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _plain(value: Any, subject: str) -> Any:
    """Returns a copy in JSON types only, because templates may call methods of their values."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_as_dict))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{subject}: cannot be given to a chat template: {error}") from None


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a type of JSON")
