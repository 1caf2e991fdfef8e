"""Converts the texts and conversations of requests to tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenizers import Encoding

from .._core import ConfigError, RequestError
from ..runtime.adapter_store import AdapterStore
from ..runtime.adapter_tokenizers import Truncation
from ..runtime.chat_template import ChatTemplate, special_tokens
from ..runtime.images.prompt import PreparedMessages, RenderedPrompt, take_images
from ..runtime.images.vision import Vision
from ..runtime.named_adapter import AdapterSum, NamedAdapter
from ..runtime.pooled import PromptTokens
from ..runtime.text_bound import LONG_TEXT, max_prompt_tokens
from .async_executor import AsyncExecutor
from .errors import ApiError
from .image_urls import ImageUrls, is_elsewhere
from .openai_chat_fields import Message, TemplateFields
from .options import ServerOptions
from .tokenizers_of_adapters import ServedTokenizers
from .work import WorkKind

_OF_MESSAGE: Final = 256
"""Number of characters whose tokenisation takes as long as a template takes for one message."""
MAX_TEMPLATES: Final = 256
"""Maximum number of adapters' templates in memory."""
MAX_REQUEST_TEMPLATES: Final = 16
"""Maximum number of requests' templates in memory."""


@dataclass(frozen=True)
class MarkedImages:
    """Images of a text that no template writes."""

    marker: str
    """Place of each image in the text."""
    urls: Sequence[str]


class Prompts:
    """Makes prompts with the tokenizer and chat template of the model or of an adapter."""

    def __init__(
        self, executor: AsyncExecutor, tokenizers: ServedTokenizers, options: ServerOptions, vision: Vision
    ) -> None:
        """Reads the model's template. Raises ConfigError for an invalid template."""
        self._executor = executor
        self._store: AdapterStore = executor.executor.adapters
        self._tokenizers = tokenizers
        self._vision = vision
        self._image_urls = ImageUrls(options)
        self._max_tokens = max_prompt_tokens(executor.executor.engine_info)
        self.max_text_tokens: Final = max(options.limits.max_tokenize_tokens, self._max_tokens)
        """Maximum number of tokens of a text that is counted or cut."""
        self._limits = options.limits.template
        self._trusts_requests = options.trust_request_chat_template
        self.is_trusted: Callable[[str], bool] = lambda text: False
        """True for templates that requests may use whatever --trust-request-chat-template says."""
        directory = executor.executor.engine.directory
        self._tokens = special_tokens(directory)
        if options.chat_template is None:
            self._base = ChatTemplate.load(directory, limits=self._limits)
        else:
            self._base = ChatTemplate.of_text(options.chat_template, self._tokens, limits=self._limits)
        self._of_requests: OrderedDict[tuple[Any, ...], ChatTemplate] = OrderedDict()
        self._own: OrderedDict[str, tuple[NamedAdapter | AdapterSum, ChatTemplate | None]] = OrderedDict()

    @property
    def has_template(self) -> bool:
        """True if the model has a template; adapters may have their own."""
        return self._base is not None

    @property
    def base_template_text(self) -> str | None:
        """Source of the model's template for conversations without tools; None: it has no template."""
        return None if self._base is None else self._base.text(with_tools=False)

    async def tokenize(
        self,
        text: str,
        adapter: str | None,
        *,
        add_special_tokens: bool,
        param: str,
        max_tokens: int | None = None,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Returns the tokens of a text with the adapter's tokenizer. param: request field of the text.

        max_tokens: a much longer text is rejected early; None: the engine's longest prompt. truncation: cuts a longer
        text, which may have as many tokens as POST /tokenize accepts; None: it is not cut.

        Raises ConfigError for an adapter's tokenizer that cannot be used, TextTooLongError, and RequestError for a
        truncation that leaves no text.
        """
        return list((await self._encoding(text, adapter, add_special_tokens, param, max_tokens, truncation)).ids)

    async def tokenize_pair(
        self,
        pair: tuple[str, str],
        adapter: str | None,
        *,
        add_special_tokens: bool,
        param: str,
        truncation: Truncation | None = None,
    ) -> PromptTokens:
        """Returns the tokens of two texts with the separators that the tokenizer adds. Raises like tokenize()."""
        encoding = await self._encoding(pair, adapter, add_special_tokens, param, truncation=truncation)
        return PromptTokens.of_pair(encoding, self._executor.executor.engine_info.num_token_types)

    async def _encoding(
        self,
        text: str | tuple[str, str],
        adapter: str | None,
        add_special_tokens: bool,
        param: str,
        max_tokens: int | None = None,
        truncation: Truncation | None = None,
    ) -> Encoding:
        own = await self._tokenizers.of(adapter)
        if max_tokens is None:
            max_tokens = self._max_tokens if truncation is None else self.max_text_tokens
        num_characters = len(text) if isinstance(text, str) else sum(map(len, text))
        if num_characters <= LONG_TEXT:
            return own.encode(text, max_tokens, param, add_special_tokens=add_special_tokens, truncation=truncation)
        # This rejects a text that is too long without using a thread.
        own.check_length(num_characters, max_tokens, param)
        return await self._executor.work.run(
            WorkKind.TEXTS,
            own.encode,
            text,
            max_tokens,
            param,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
        )

    async def tokenize_chat(
        self,
        fields: TemplateFields,
        adapter: str | None,
        tools: Sequence[dict[str, Any]] | None,
        *,
        max_tokens: int | None = None,
        truncation: Truncation | None = None,
        with_rows: bool = True,
        with_digests: bool = False,
    ) -> RenderedPrompt:
        """Returns the tokens of a conversation, and the rows of its images.

        The request's template writes it, or else the adapter's or the model's.

        max_tokens, truncation: as in tokenize(). with_rows: False: the rows are not computed, for counting.
        with_digests: True: with digests of the images' pixels, for receipts.

        Raises ApiError without a template and for a request's template that may not or cannot be used, RequestError if
        the template rejects the messages, ConfigError for an adapter's template that cannot be used, and
        TextTooLongError.
        """
        template = await self.template_for(fields, adapter)
        if template is None:
            raise ApiError(
                "neither the model nor the adapter has a chat template: there is no chat_template.jinja, no "
                "additional_chat_templates, and no chat_template in tokenizer_config.json; send the text to "
                "/v1/completions",
                param="messages",
            )
        urls = [url for message in fields.messages for url in message.image_urls]
        if urls:
            return await self._with_images(
                fields,
                adapter,
                tools,
                template,
                max_tokens,
                truncation,
                urls,
                with_rows=with_rows,
                with_digests=with_digests,
            )
        length = sum(_length(message) for message in fields.messages)
        length += sum(len(text) for document in fields.documents or () for text in document.values())
        if template is self._base and length <= LONG_TEXT:
            text = _rendered(template, fields, tools)
        else:
            # A template of an adapter or a request may come from a client and be slow.
            text = await self._executor.work.run(WorkKind.TEMPLATES, _rendered, template, fields, tools)
        tokens = await self.tokenize(
            text,
            adapter,
            add_special_tokens=fields.add_special_tokens,
            param="messages",
            max_tokens=max_tokens,
            truncation=truncation,
        )
        return RenderedPrompt(tokens)

    async def _with_images(
        self,
        fields: TemplateFields,
        adapter: str | None,
        tools: Sequence[dict[str, Any]] | None,
        template: ChatTemplate,
        max_tokens: int | None,
        truncation: Truncation | None,
        urls: Sequence[str],
        *,
        with_rows: bool,
        with_digests: bool,
    ) -> RenderedPrompt:
        if truncation is not None:
            raise ApiError(
                "truncate_prompt_tokens is given with images; expected none, because images cannot be cut",
                param="truncate_prompt_tokens",
            )
        own = await self._tokenizers.of(adapter)
        longest = self._max_tokens if max_tokens is None else max_tokens

        def render(messages: Sequence[dict[str, Any]]) -> str:
            return _rendered(template, fields, tools, messages)

        def tokens(text: str) -> list[int]:
            return list(own.encode(text, longest, "messages", add_special_tokens=fields.add_special_tokens).ids)

        def made(files: Mapping[str, bytes]) -> RenderedPrompt:
            taken = take_images([_template_message(message) for message in fields.messages])
            # Other APIs than OpenAI's have images at other places, but in the same order.
            places = _places(len(taken.images), "the request")
            taken = replace(taken, images=[files.get(url, url) for url in taken.images], places=places)
            return RenderedPrompt(
                *self._vision.prompt(
                    taken, adapter, render, tokens, paths=False, with_rows=with_rows, with_digests=with_digests
                )
            )

        return await self._seen(made, urls, "messages")

    async def tokenize_marked(
        self,
        text: str,
        images: MarkedImages,
        adapter: str | None,
        *,
        add_special_tokens: bool,
        param: str,
        with_digests: bool,
    ) -> RenderedPrompt:
        """Returns the tokens of a text with images, and the rows of the images. param: request field of the text.
        with_digests: as in tokenize_chat().

        Raises ApiError for images that cannot be used, and as tokenize() does.
        """
        own = await self._tokenizers.of(adapter)

        def tokens(text: str) -> list[int]:
            return list(own.encode(text, self._max_tokens, param, add_special_tokens=add_special_tokens).ids)

        def made(files: Mapping[str, bytes]) -> RenderedPrompt:
            urls = images.urls
            taken = PreparedMessages([], [files.get(url, url) for url in urls], _places(len(urls), param))
            place = self._vision.place

            def render(_: Sequence[Any]) -> str:
                return text.replace(images.marker, place)

            return RenderedPrompt(
                *self._vision.prompt(taken, adapter, render, tokens, paths=False, with_digests=with_digests)
            )

        return await self._seen(made, images.urls, param)

    async def _seen(
        self, made: Callable[[Mapping[str, bytes]], RenderedPrompt], urls: Sequence[str], param: str
    ) -> RenderedPrompt:
        """Calls `made` in a thread with the files of URLs that are elsewhere."""
        work = self._executor.work
        try:
            self._vision.check(len(urls))
            files: Mapping[str, bytes] = {}
            if any(map(is_elsewhere, urls)):
                files = await work.run(WorkKind.DOWNLOADS, self._image_urls.read, urls)
            return await work.run(WorkKind.IMAGES, made, files)
        except RequestError as error:
            raise ApiError(str(error), param=param) from error

    async def template_for(self, fields: TemplateFields, adapter: str | None) -> ChatTemplate | None:
        """Returns the template of a request: its own, or else that of template_of(). Raises like tokenize_chat().

        The request's own template has the special tokens of the other one.
        """
        usual = await self.template_of(adapter)
        text = fields.chat_template
        if text is None:
            return usual
        if not self._trusts_requests and not self.is_trusted(text):
            raise ApiError(
                "chat_template is given; expected none, because the server was started without "
                "--trust-request-chat-template",
                param="chat_template",
            )

        tokens = self._tokens if usual is None else usual.special_tokens
        key = (text, *tokens.items())
        found = self._of_requests.get(key)
        if found is None:
            try:
                found = await self._executor.work.run(
                    WorkKind.TEMPLATES, ChatTemplate.of_text, text, tokens, limits=self._limits
                )
            except ConfigError as error:
                raise ApiError(str(error), param="chat_template") from error
            self._of_requests[key] = found
            if len(self._of_requests) > MAX_REQUEST_TEMPLATES:
                self._of_requests.popitem(last=False)
        return found

    async def template_of(self, name: str | None) -> ChatTemplate | None:
        """Returns the template of an adapter, or else the model's. name: None: the base model.

        Reads an adapter's template once, and again after a replacement. Raises ConfigError if it cannot be used.
        """
        if name is None:
            return self._base
        adapter = self._store.find(name)
        known, template = self._own.get(name, (None, None))
        if known != adapter:
            template = await self._executor.work.run(
                WorkKind.FILES, ChatTemplate.load, adapter.directory, base=self._base, limits=self._limits
            )
            self._own[name] = (adapter, template)
            if len(self._own) > MAX_TEMPLATES:
                self._own.popitem(last=False)
        return self._base if template is None else template


def _places(num_images: int, whole: str) -> list[str]:
    """Returns names of a request's images for errors."""
    return [f"image {number} of {whole}" for number in range(1, num_images + 1)]


def _length(message: Message) -> int:
    """Returns the message's number of characters, plus an allowance for the template's time per message and part."""
    content = message.content or ""
    length = (
        len(content) if isinstance(content, str) else len(content) * _OF_MESSAGE + sum(map(len, message.text_parts))
    )
    called = sum(len(call.function.arguments) + _OF_MESSAGE for call in message.tool_calls or ())
    return length + called + len(message.reasoning_content or "") + _OF_MESSAGE


def _rendered(
    template: ChatTemplate,
    fields: TemplateFields,
    tools: Sequence[dict[str, Any]] | None,
    messages: Sequence[dict[str, Any]] | None = None,
) -> str:
    """messages: in place of those of `fields`."""
    return template.render(
        [_template_message(message) for message in fields.messages] if messages is None else messages,
        tools=tools,
        documents=fields.documents,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs,
    )


_NOT_FOR_TEMPLATES: Final[Any] = {
    "annotations": True,
    "cache_control": True,
    "reasoning": True,
    "content": {"__all__": {"annotations", "cache_control"}},
}
"""Fields of a message that mean nothing to the model. They are left out because templates may print all fields."""


def _template_message(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude=_NOT_FOR_TEMPLATES)
    if message.content is None:
        fields["content"] = None  # templates distinguish null from an empty text
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    # Templates know only the older name, and many reject unknown roles.
    return fields | {"role": "system"} if message.role == "developer" else fields
