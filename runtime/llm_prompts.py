"""Prompts of LLM's callers: texts, token ids, and the dictionaries of vLLM and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, TypeAlias

from .._core import RequestError, SamplingConfig
from ..common.shown_value import shown

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a text may have "multi_modal_data" with images."""

_TEXT: Final = "prompt"
_IDS: Final = "prompt_token_ids"
_DATA: Final = "multi_modal_data"
_IMAGES: Final = "image"


@dataclass(frozen=True, eq=False)
class SeeingText:
    """A text with the model's own marks for images, and the images in their order."""

    text: str
    images: list[Any]
    places: list[str]
    """Place of each image, for errors."""


def is_one_prompt(prompts: Any) -> bool:
    """True for one prompt, False for several. A list that begins with a token id is one prompt."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and _is_id(prompts[0])


def is_conversation(messages: Any) -> bool:
    """True for the messages of one conversation, False for several conversations."""
    return not messages or not isinstance(messages, Sequence) or isinstance(messages[0], Mapping)


def listed_prompts(prompts: Any) -> list[str | list[int] | SeeingText]:
    """Returns each prompt's text or token ids, or its text with images. Raises RequestError for anything else."""
    if is_one_prompt(prompts):
        return [text_or_ids(prompts, "prompts")]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {shown(prompts)}; expected a prompt or a list of prompts")
    return [text_or_ids(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]


def text_or_ids(prompt: Any, name: str) -> str | list[int] | SeeingText:
    """Returns the text or the token ids of one prompt, or its text with images. name: for errors.

    Raises RequestError for anything else.

    If a dictionary has both, the ids count, because the text is only their source.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        given = {key: value for key, value in prompt.items() if value is not None}
        if data := given.pop(_DATA, None):
            return _seeing(given, data, name)
        if unknown := sorted(map(str, given.keys() - {_TEXT, _IDS})):
            raise RequestError(f"{name} has the key {unknown[0]!r}; expected '{_TEXT}' or '{_IDS}'")
        if _IDS in given:
            return _ids(given[_IDS], f"{name}['{_IDS}']")
        if not isinstance(given.get(_TEXT), str):
            raise RequestError(f"{name} is {shown(prompt)}; expected a text as '{_TEXT}', or '{_IDS}'")
        return str(given[_TEXT])
    return _ids(prompt, name)


def _seeing(given: Mapping[str, Any], data: Any, name: str) -> SeeingText:
    """given: the prompt without its multi_modal_data."""
    if not isinstance(data, Mapping) or set(data) != {_IMAGES}:
        raise RequestError(
            f"{name}['{_DATA}'] is {shown(data)}; expected {{'{_IMAGES}': an image or a list of images}}"
        )
    if set(given) != {_TEXT} or not isinstance(given[_TEXT], str):
        raise RequestError(f"{name} has '{_DATA}' with {shown(sorted(map(str, given)))}; expected a text as '{_TEXT}'")
    images = data[_IMAGES] if isinstance(data[_IMAGES], list) else [data[_IMAGES]]
    return SeeingText(given[_TEXT], images, [f"{name}['{_DATA}']['{_IMAGES}'][{i}]" for i in range(len(images))])


def is_greedy(sampling: SamplingConfig) -> bool:
    """True if the executor always takes the most likely token."""
    nothing_given = not sampling.top_k and sampling.top_p is None and not sampling.min_p
    return nothing_given or sampling.top_k == 1 or sampling.temperature == 0.0


def has_idle_temperature(sampling: SamplingConfig) -> bool:
    """True if a temperature is set although the configuration is greedy.

    In TensorRT-LLM a temperature has no effect without top_k or top_p; other libraries sample with it.
    """
    return sampling.beam_width == 1 and is_greedy(sampling) and sampling.top_k != 1 and bool(sampling.temperature)


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise RequestError(
            f"{name} is {shown(value)}; expected a text, token ids, or a dictionary with '{_TEXT}' or '{_IDS}'"
        )
    ids = list(value)
    for i, token in enumerate(ids):
        if not _is_id(token):
            raise RequestError(f"{name}[{i}] is {shown(token)}; expected a token id")
    return [int(token) for token in ids]


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
