"""What a model family's file says about it, and the parts that several families share.

A family is data: how its Hugging Face config.json maps to the features of CheckpointConfig. Everything after
that (names of tensors, shards, the network) follows from those features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..json_fields import JsonFields, describe

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Features:
    """The fields of CheckpointConfig in which families differ."""

    attn_bias: bool = False
    attn_dense_bias: bool = False
    mlp_bias: bool = False
    qk_layernorm: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One architecture of Hugging Face's config.json."""

    architecture: str
    read_features: Callable[[JsonFields, int], Features]
    """Takes the family's own fields; the second argument is num_hidden_layers."""
    optional_fields: frozenset[str] = frozenset()
    """num_key_value_heads and head_dim, where the family derives them from other sizes if left out."""
    neutral_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the family does not have, with the value at which they mean nothing; others are refused."""


def sliding_window_of_all_layers(fields: JsonFields, num_hidden_layers: int) -> Features:
    """One window for every layer, or null."""
    if "sliding_window" not in fields:
        fields.problem("sliding_window", "is missing; expected an integer, or null for full attention")
        return Features()
    window = fields.optional_integer("sliding_window")
    return Features(
        sliding_window=window, sliding_window_layers=() if window is None else tuple(range(num_hidden_layers))
    )


def sliding_window_by_layer(fields: JsonFields, num_hidden_layers: int) -> Features:
    """A window for the layers that layer_types names, or those from max_window_layers on."""
    enabled = fields.boolean("use_sliding_window", default=False)
    declared = fields.optional_integer("sliding_window")
    first = fields.integer("max_window_layers", minimum=0, default=num_hidden_layers)
    layer_types = fields.raw("layer_types")
    if enabled and "sliding_window" not in fields:
        fields.problem("sliding_window", "is missing, but use_sliding_window is true")
    window = declared if enabled else None
    if layer_types is None:
        layers = tuple(range(first, num_hidden_layers)) if window is not None else ()
    elif _are_layer_types(layer_types, num_hidden_layers):
        layers = tuple(layer for layer, kind in enumerate(layer_types) if kind == SLIDING_ATTENTION)
    else:
        fields.problem(
            "layer_types",
            f"is {describe(layer_types)}; expected {num_hidden_layers} times {FULL_ATTENTION} or {SLIDING_ATTENTION}",
        )
        layers = ()
    if layers and window is None:
        fields.problem("layer_types", f"has {SLIDING_ATTENTION}, but there is no sliding_window in use")
    return Features(sliding_window=window if layers else None, sliding_window_layers=layers)


def _are_layer_types(value: object, num_hidden_layers: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == num_hidden_layers
        and all(kind in (FULL_ATTENTION, SLIDING_ATTENTION) for kind in value)
    )
