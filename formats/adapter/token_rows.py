"""Trained tokens (PEFT's trainable_token_indices and TRAINABLE_TOKENS): rows of the embedding and lm_head.

They replace the base's rows. A change of n rows is LoRA of rank n. For the embedding, A selects the tokens (one-hot)
and B holds the differences from the base's rows; for lm_head, A and B are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModule, AdaptedModules
from .adapter import Adapter, Array, FloatArray, ModuleTensors, TokenRows
from .base_weights import BaseWeights
from .names import EMBEDDING, LM_HEAD, PEFT_PREFIX, ModuleKey, Role, module_at
from .peft_config import PeftConfig
from .problems import join_problems

_NAME: Final = re.compile(r"(?P<path>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.[^.]+)?")


def is_token_rows(name: str) -> bool:
    """True if a tensor holds rows of trained tokens."""
    return _NAME.fullmatch(name) is not None


def read_token_rows(
    tensors: Mapping[str, Array], config: PeftConfig, modules: AdaptedModules | None
) -> tuple[dict[ModuleKey, TokenRows], list[str]]:
    """Returns the rows by module, or none and the problems. is_token_rows() is true for all `tensors`."""
    problems = []
    found: dict[ModuleKey, TokenRows] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        key = None if match is None else module_at(match["path"].removeprefix(PEFT_PREFIX), modules)
        if key is None or not key.module.is_of_vocabulary:
            problems.append(f"tensor '{name}': belongs to neither lm_head nor the embedding of tokens")
            continue
        tokens = config.tokens_of(key.path, is_embedding=key.module.name == EMBEDDING)
        if not tokens and _is_saved_twice(name, tensors):
            continue
        if tensor.ndim != 2 or len(tensor) != len(tokens) or not np.isfinite(tensor.astype(np.float32)).all():
            problems.append(
                f"tensor '{name}': has the shape {list(tensor.shape)}, or values that are not finite; expected a row "
                f"for each of {len(tokens)} trained tokens"
            )
        found[key] = TokenRows(name, tokens, tensor)
    if config.token_indices and not tensors:
        problems.append("has no trainable_tokens_delta, but adapter_config.json names tokens")
    return ({}, problems) if problems else (found, [])


def _is_saved_twice(name: str, tensors: Mapping[str, Array]) -> bool:
    """True if another tensor has the same rows: PEFT also saves the rows of a tied lm_head."""
    return any(other != name and np.array_equal(tensor, tensors[name]) for other, tensor in tensors.items())


@dataclass(frozen=True)
class _Place:
    """Target of trained rows."""

    key: ModuleKey
    layer: AdaptedModule
    rows: TokenRows


def add_token_rows(
    adapter: Adapter, base: BaseWeights | None, modules: AdaptedModules | None, max_rank: int | None, *, left_open: bool
) -> None:
    """Adds modules for the adapter's trained tokens.

    As in PEFT, a tied lm_head uses the embedding's rows unless it has its own.

    left_open: True accepts a missing base; then the rows have the right sizes, but not their values.

    Raises AdapterError if the base is missing, and for rows that cannot be served.
    """
    if not adapter.token_rows:
        return
    if modules is None or (base is None and not left_open):
        raise AdapterError(f"{adapter.file}: trained tokens replace rows of the base model; give the base model")
    problems = []
    for place in _places(adapter, modules):
        name, tokens = place.rows.name, place.rows.tokens
        of_embedding = place.layer.module == EMBEDDING
        vocabulary = place.layer.in_size if of_embedding else place.layer.out_size
        width = place.layer.out_size if of_embedding else place.layer.in_size
        if place.key in adapter.modules:
            problems.append(f"tensor '{name}': '{place.key.path}' has trained tokens, and also LoRA or a whole weight")
        elif place.rows.values.shape[1] != width:
            problems.append(f"tensor '{name}': rows have {place.rows.values.shape[1]} elements; expected {width}")
        elif max_rank is not None and len(tokens) > max_rank:
            problems.append(
                f"tensor '{name}': {len(tokens)} trained tokens need LoRA of that rank, above max_lora_rank {max_rank}"
            )
        else:
            values = place.rows.values.astype(np.float32)
            delta = values if base is None else values - base.rows_at(place.key, tokens)
            adapter.modules[place.key] = as_lora_of_tokens(name, tokens, delta, vocabulary, of_embedding=of_embedding)
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))


def _places(adapter: Adapter, modules: AdaptedModules) -> list[_Place]:
    places = []
    for key, rows in adapter.token_rows.items():
        layer = modules.find(key.path)
        if layer is None:
            raise AdapterError(f"{adapter.file}: module '{key.path}' does not exist in the model")
        places.append(_Place(key, layer, rows))
    heads = [layer for layer in modules.by_path.values() if layer.module == LM_HEAD and layer.tied_to is not None]
    if len(places) == 1 and places[0].layer.module == EMBEDDING and heads:
        head = module_at(heads[0].path, modules)
        assert head is not None  # the path comes from the model
        places.append(_Place(head, heads[0], places[0].rows))
    return places


def as_lora_of_tokens(
    name: str,
    tokens: Sequence[int] | npt.NDArray[np.intp],
    delta: FloatArray,
    vocabulary: int,
    *,
    of_embedding: bool,
) -> ModuleTensors:
    """Returns LoRA that adds delta [tokens, hidden size] to the rows of `tokens`. `name` is the source tensor."""
    chosen = np.zeros((len(tokens), vocabulary), np.float32)
    chosen[np.arange(len(tokens)), tokens] = 1
    a, b = (chosen, delta.T) if of_embedding else (delta, chosen.T)
    return ModuleTensors(
        np.ascontiguousarray(a), np.ascontiguousarray(b), None, 1.0, dict.fromkeys((Role.A, Role.B), name)
    )
