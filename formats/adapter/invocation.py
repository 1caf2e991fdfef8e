"""aLoRA (arXiv:2504.12397): adapters that are active from their invocation tokens on.

The KV before the invocation tokens is the base model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules
from .classifier_head import fields_without_head, is_classifier
from .peft_config import parse_peft_config
from .recognise import AdapterFormat, recognise


def invocation_tokens(directory: str | Path, modules: AdaptedModules | None = None) -> tuple[int, ...]:
    """Returns the token ids from which on the adapter in `directory` is active; () if it is always active.

    modules: modules of the model that the adapter is for; None: a decoder's. Raises AdapterError if the directory has
        no adapter_config.json, or none that can be served.
    """
    kind, fields = recognise(Path(directory), modules, classifiers=True)
    if kind is AdapterFormat.MLX:
        return ()
    if is_classifier(fields):
        fields = fields_without_head(fields)
    return parse_peft_config(fields, str(directory)).invocation_tokens


def invocation_start(directory: str | Path, input_token_ids: Sequence[int]) -> int:
    """Returns LoraConfig.active_from for a prompt: the position of the last occurrence of the invocation tokens.

    Returns 0 for adapters that are not aLoRA. Raises AdapterError if the prompt lacks the invocation tokens (send it
    without lora_config; then the base model answers), and for the reasons of invocation_tokens().
    """
    invocation = invocation_tokens(directory)
    start = find_start(invocation, input_token_ids)
    if start is None:
        raise AdapterError(
            f"{directory}: the prompt does not have the aLoRA adapter's invocation tokens {list(invocation)}; expected "
            "them, or a request without lora_config, which the base model answers"
        )
    return start


def find_start(invocation: Sequence[int], input_token_ids: Sequence[int]) -> int | None:
    """Returns the position of the last occurrence of `invocation`: 0 for no tokens, None if the prompt lacks them."""
    count = len(invocation)
    if count == 0:
        return 0
    wanted = list(invocation)
    for start in range(len(input_token_ids) - count, -1, -1):
        if input_token_ids[start] == wanted[0] and list(input_token_ids[start : start + count]) == wanted:
            return start
    return None
