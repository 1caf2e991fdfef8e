"""Arguments of vLLM's methods of LLM: taken, accepted with their default, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from .._core import RequestError
from ..common.shown_value import shown
from .vllm_arguments import Accepted, is_among, listed

_ONE_WAY: Final = "images are read as the model's image processor does"
_BY_TOKENIZER: Final = "give token ids as prompts for other tokens than the tokenizer's"

_EITHER: Final[Mapping[str, Accepted]] = {
    "priority": Accepted((0,), "a Request of the executor takes priority"),
    "tokenization_kwargs": Accepted(({},), _BY_TOKENIZER),
    "mm_processor_kwargs": Accepted(({},), _ONE_WAY),
}
_GENERATE: Final[Mapping[str, Accepted]] = {
    **_EITHER,
    "prompt_token_ids": Accepted((), "give the ids as prompts"),
    "guided_options_request": Accepted((), "give guided_decoding_params"),
    "prompt_adapter_request": Accepted((), "give an adapter of PEFT's prompt tuning as lora"),
}
_CHAT: Final[Mapping[str, Accepted]] = {
    **_EITHER,
    "chat_template": Accepted((), "give LLM(tokenizer=DIR) a directory with chat_template.jinja"),
    "chat_template_content_format": Accepted(("auto",), "the template decides"),
    "add_generation_prompt": Accepted((True,), "generate() continues any text"),
    "continue_final_message": Accepted((False,), "generate() continues any text"),
}
_POOLED: Final[Mapping[str, Accepted]] = {
    "tokenization_kwargs": Accepted(({},), "texts are tokenised as the tokenizer says"),
    "mm_processor_kwargs": Accepted(({},), _ONE_WAY),
    "truncate_prompt_tokens": Accepted((), "texts are used whole"),
    "priority": Accepted((0,), "a Request of the executor takes priority"),
}
_TABLES: Final[Mapping[str, Mapping[str, Accepted]]] = {
    "generate": _GENERATE,
    "chat": _CHAT,
    "embed": {**_POOLED, "pooling_params": Accepted((), "give pooling_type and normalize")},
    "classify": {**_POOLED, "pooling_params": Accepted((), "the classifier says how texts are pooled")},
}


class MethodArguments(NamedTuple):
    """Arguments with those of vLLM added."""

    lora: Any
    progress: bool | None
    template_variables: Mapping[str, Any] | None


def with_method_arguments(
    method: str,
    arguments: Mapping[str, Any],
    *,
    lora: Any,
    progress: bool | None,
    template_variables: Mapping[str, Any] | None = None,
) -> MethodArguments:
    """Returns a method's arguments with vLLM's names: lora_request, use_tqdm, and in chats chat_template_kwargs.

    method: "generate", "chat", "embed" or "classify". An argument that is None counts as absent.

    Raises RequestError with all that cannot be used, and for one that is given under both names; TypeError for a name
    that is unknown.
    """
    own: dict[str, Any] = {"lora": lora, "progress": progress, "template_variables": template_variables}
    ours = {"lora_request": "lora", "use_tqdm": "progress"}
    if method == "chat":
        ours["chat_template_kwargs"] = "template_variables"
    table = _TABLES[method]
    problems = []
    for name, value in arguments.items():
        if name not in ours and name not in table:
            raise TypeError(f"LLM.{method}() got an unexpected keyword argument '{name}'")
        if value is None:
            continue
        if name in table:
            if not is_among(value, table[name].values):
                expected = f"{listed(table[name].values)}: " if table[name].values else "no value: "
                problems.append(f"{name} is {shown(value)}; expected {expected}{table[name].reason}")
        elif name == "use_tqdm" and not isinstance(value, bool):
            problems.append(f"use_tqdm is {shown(value)}; expected True or False")
        elif own[ours[name]] is not None:
            problems.append(f"{name} and {ours[name]} are given; expected one of them")
        else:
            own[ours[name]] = value
    if problems:
        raise RequestError("; ".join(problems))
    return MethodArguments(**own)
