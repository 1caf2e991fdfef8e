"""Images of a conversation: takes them out of its messages, and puts their rows at their tokens in the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..._core import PromptTuningConfig, RequestError
from ...common.shown_value import shown
from ..chat_template import IMAGE_PART

_KEYS: Final = ("image", "path", "url")
"""Keys of a part's image: those that transformers' messages have."""


@dataclass(frozen=True, eq=False)
class VirtualPrompt:
    """A prompt as the executor gets it."""

    ids: list[int]
    """Tokens of the text, and virtual tokens for the rows of images."""
    rows: PromptTuningConfig
    digests: tuple[str, ...] = ()
    """See PromptImages.digests."""


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Rows of all images of a prompt."""

    rows: PromptTuningConfig
    image_token_id: int
    """Token of the prompt that stands for a row."""
    digests: tuple[str, ...] = field(default=(), kw_only=True)
    """Digest of each image's pixels, as opened.digest_of() makes them."""

    def within(self, prompt: Sequence[int], vocab_size: int) -> VirtualPrompt:
        """Returns the prompt with the rows' numbers, which follow the vocabulary, in place of image tokens."""
        numbers = iter(range(vocab_size, vocab_size + len(self.rows.embedding_table)))
        ids = [next(numbers) if token == self.image_token_id else token for token in prompt]
        return VirtualPrompt(ids, self.rows, self.digests)


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """Tokens of a prompt, and the rows of its images."""

    ids: list[int]
    images: PromptImages | None = None


@dataclass(frozen=True)
class PreparedMessages:
    """A conversation whose images were replaced by parts that templates read."""

    messages: list[Mapping[str, Any]]
    images: list[Any] = field(default_factory=list)
    """The images in their order, as the caller gave them."""
    places: list[str] = field(default_factory=list)
    """Place of each image, for errors."""


def has_images(messages: Any) -> bool:
    """True if a message's content has a part that is an image."""
    return any(True for _ in _image_parts(messages))


def take_images(messages: Sequence[Mapping[str, Any]]) -> PreparedMessages:
    """Takes images out of messages: {"type": "image", "image": ...}, with "path" or "url" in place of "image", and
    OpenAI's {"type": "image_url", "image_url": {"url": ...}}.

    Raises RequestError for a part without an image.
    """
    prepared = PreparedMessages(list(messages))
    changed: dict[int, list[Any]] = {}
    for number, at, part in _image_parts(messages):
        subject = f"messages[{number}].content[{at}]"
        prepared.images.append(_image_of(part, subject))
        prepared.places.append(subject)
        changed.setdefault(number, list(messages[number]["content"]))[at] = IMAGE_PART
    for number, content in changed.items():
        prepared.messages[number] = {**messages[number], "content": content}
    return prepared


def _image_parts(messages: Any) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    if not isinstance(messages, Sequence):
        return
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for at, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                yield number, at, part


def _image_of(part: Mapping[str, Any], subject: str) -> Any:
    if part["type"] == "image_url":
        nested = part.get("image_url")
        url = nested.get("url") if isinstance(nested, Mapping) else nested
        if not isinstance(url, str):
            raise RequestError(f'{subject} is {shown(part)}; expected {{"image_url": {{"url": "data:..."}}}}')
        return url
    given = [part[key] for key in _KEYS if part.get(key) is not None]
    if len(given) != 1:
        raise RequestError(f"{subject} has {len(given)} images; expected one, as {', '.join(_KEYS)}")
    return given[0]


def expand(text: str, place: str, images: Sequence[str]) -> str:
    """Replaces each `place` in a rendered conversation by the text of an image.

    Raises RequestError if there are not as many places as images.
    """
    pieces = text.split(place)
    if len(pieces) - 1 != len(images):
        raise RequestError(
            f"the rendered messages have {len(pieces) - 1} tokens {place} for {len(images)} images; expected one "
            f"for each image, and no text with {place}"
        )
    made = [pieces[0]]
    for image, piece in zip(images, pieces[1:], strict=True):
        made += [image, piece]
    return "".join(made)
