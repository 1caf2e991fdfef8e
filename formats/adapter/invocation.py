"""aLoRA (arXiv:2504.12397): adapters that act from their invocation tokens on, over the base model's KV before them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .classifier_head import fields_without_head, is_classifier
from .peft_config import parse_peft_config
from .recognise import AdapterFormat, recognise


def invocation_tokens(directory: str | Path, modules: AdaptedModules | None = None) -> tuple[int, ...]:
    """The token ids that the adapter in `directory` acts from on; () for one that acts from the start.

    modules: those of the model that it is for; None: a decoder's.

    Raises AdapterError for a directory without an adapter_config.json that can be served.
    """
    kind, fields = recognise(Path(directory), modules, classifiers=True)
    if kind is AdapterFormat.MLX:
        return ()
    if is_classifier(fields):
        fields = fields_without_head(fields)
    return parse_peft_config(fields, str(directory)).invocation_tokens


def invocation_start(directory: str | Path, input_token_ids: Sequence[int]) -> int:
    """LoraConfig.active_from of a prompt: where the last occurrence of the adapter's invocation tokens begins.

    0 for adapters that are no aLoRA. Raises AdapterError for a prompt that does not have them, whose request has no
    lora_config (the answer is the base model's), and as invocation_tokens().
    """
    invocation = invocation_tokens(directory)
    start = find_start(invocation, input_token_ids)
    if start is None:
        raise AdapterError(
            f"{directory}: an aLoRA adapter, which acts from its invocation tokens {list(invocation)} on, and the "
            "prompt does not have them; expected a request without lora_config, which the base model answers"
        )
    return start


def find_start(invocation: Sequence[int], input_token_ids: Sequence[int]) -> int | None:
    """Where the last occurrence of `invocation` begins: 0 for no tokens, None for a prompt that does not have them."""
    count = len(invocation)
    if count == 0:
        return 0
    wanted = list(invocation)
    for start in range(len(input_token_ids) - count, -1, -1):
        if input_token_ids[start] == wanted[0] and list(input_token_ids[start : start + count]) == wanted:
            return start
    return None
