"""Chat templates: how the messages of a conversation become the text that a model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .._core import ConfigError, RequestError
from ..builder.adapter_copy import SPECIAL_TOKENS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from ..builder.json_fields import describe, load_json_object

if TYPE_CHECKING:
    from .template_sandbox import CompiledTemplate

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Of several named templates, the one for requests with tools."""

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_FILE_BYTES: Final = 1 << 26
"""tokenizer_config.json lists the added tokens, some thousands at most."""
_MAX_TEMPLATE_CHARACTERS: Final = 1 << 20
"""Templates have some thousands; compiling one takes far longer than reading it."""
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """The template of one model or adapter."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        """Compiles `templates`, by name; `source` is the file that errors name.

        Raises ConfigError for one that is not in jinja2's language, and where jinja2 is not installed.
        """
        self.source = source
        self.special_tokens: Final = dict(special_tokens)
        self._templates = _compiled(templates, source)

    @classmethod
    def load(cls, directory: str | Path, *, base: ChatTemplate | None = None) -> ChatTemplate | None:
        """The template in a directory of a model, an engine or an adapter; None where it has none.

        chat_template.jinja goes before the `chat_template` of tokenizer_config.json, as in transformers. An adapter's
        template finds the special tokens that its own files do not name in those of `base`.

        Raises ConfigError that names the file which cannot be used.
        """
        directory = Path(directory)
        tokenizer_config = _read_json(directory / TOKENIZER_CONFIG_FILE)
        path = directory / TEMPLATE_FILE
        if path.is_file():
            templates, source = {DEFAULT: _read_text(path)}, path
        else:
            source = directory / TOKENIZER_CONFIG_FILE
            templates = _named_templates(tokenizer_config.get("chat_template"), source)
        if not templates:
            return None
        tokens = {} if base is None else base.special_tokens
        tokens = tokens | special_tokens_of(directory / SPECIAL_TOKENS_FILE)
        tokens = tokens | _special_tokens(tokenizer_config, directory / TOKENIZER_CONFIG_FILE)
        return cls(templates, tokens, str(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Tokenise it with add_special_tokens=False: it has them where they belong.

        Messages are in OpenAI's form. What only that form has is turned into what templates expect: contents that are
        lists of text parts become one text, a line break between the parts, and the arguments of tool calls, which are
        JSON texts there, become objects. `variables` are the template's own, such as Qwen3's enable_thinking.

        Raises RequestError for messages in another form, and for those that the template refuses or fails with.
        """
        conversation = _conversation(messages)
        given = _plain({} if variables is None else variables, "variables")
        if taken := sorted(_RESERVED & given.keys()):
            raise RequestError(f"chat template variables: {', '.join(taken)} cannot be given as a variable")
        name, template = self._choose(with_tools=bool(tools))
        try:
            return template.render(
                {
                    **self.special_tokens,
                    **given,
                    "messages": conversation,
                    "tools": _plain(list(tools), "tools") if tools else None,
                    "documents": _plain(list(documents), "documents") if documents else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is a program, and may fail in any way
            which = "" if name == DEFAULT else f"template '{name}': "
            raise RequestError(f"{self.source}: {which}the messages cannot be rendered: {_reason(error)}") from error

    def _choose(self, *, with_tools: bool) -> tuple[str, CompiledTemplate]:
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            names = ", ".join(f"'{name}'" for name in self._templates)
            raise RequestError(f"{self.source}: has no template named '{DEFAULT}'; it has: {names}")
        return name, self._templates[name]


def _compiled(templates: Mapping[str, str], source: str) -> dict[str, CompiledTemplate]:
    try:
        from jinja2 import TemplateError

        from .template_sandbox import ChatEnvironment, CompiledTemplate
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source}: chat templates need jinja2; install adaptrt[serve]") from error
    environment = ChatEnvironment()
    compiled = {}
    for name, text in templates.items():
        which = "" if name == DEFAULT else f"template '{name}': "
        if len(text) > _MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(f"{source}: {which}has {len(text)} characters; at most {_MAX_TEMPLATE_CHARACTERS}")
        try:
            compiled[name] = CompiledTemplate(environment, text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"{source}: {which}cannot be used as a chat template: {_reason(error)}") from error
    return compiled


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if line is not None else ""
    # jinja2's syntax errors have the line and its text in str() as well.
    return f"{where}{getattr(error, 'message', None) or str(error) or type(error).__name__}"


def _named_templates(value: Any, source: Path) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: a text, or a list of named ones."""
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


def _special_tokens(fields: Mapping[str, Any], source: Path) -> dict[str, str]:
    """The special tokens that a file names: texts, or AddedTokens with `content`."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = fields.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise ConfigError(f"{source}: {name} is {describe(value)}; expected a token's text")
    return tokens


def special_tokens_of(path: Path) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json or special_tokens_map.json names; {} without the file.

    Raises ConfigError that names the file which cannot be used.
    """
    return _special_tokens(_read_json(path), path)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} without the file."""
    if not path.is_file():
        return {}
    _check_size(path)
    return load_json_object(path, ConfigError)


def _read_text(path: Path) -> str:
    _check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has {size} bytes; at most {_MAX_FILE_BYTES} are read")


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
            fields["content"] = _joined_text(fields["content"], f"{subject}.content")
        if fields.get("tool_calls"):
            fields["tool_calls"] = _with_objects(fields["tool_calls"], f"{subject}.tool_calls")
        conversation.append(fields)
    if not conversation:
        raise RequestError("messages is empty")
    return conversation


def _joined_text(parts: list[Any], subject: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f'{subject}[{number}] is {describe(part)}; expected {{"type": "text", "text": ...}}')
        texts.append(text)
    return "\n".join(texts)


def _with_objects(tool_calls: Any, subject: str) -> list[Any]:
    """Tool calls whose arguments are objects."""
    if not isinstance(tool_calls, list):
        raise RequestError(f"{subject} is {describe(tool_calls)}; expected a list")
    for number, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError) as error:
            where = f"{subject}[{number}].function.arguments"
            raise RequestError(f"{where} is {describe(function['arguments'])}, not JSON: {error}") from None
        function["arguments"] = arguments
    return tool_calls


def _plain(value: Any, subject: str) -> Any:
    """A copy in JSON's types alone: templates may call the methods of what they are given."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_as_dict))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{subject}: cannot be given to a chat template: {error}") from None


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a type of JSON")
