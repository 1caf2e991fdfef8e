"""What a model family's file says about it, and how several families read their fields.

A family reads the fields of Hugging Face's config.json into a CheckpointConfig, and declares its network. Everything
else (names of tensors, shards, adapters, the program, the ONNX graph) follows from that declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...common.json_fields import JsonFields, describe
from ..checkpoint.config import ROPE, CheckpointConfig
from ..checkpoint.rotary import read_rotary_scaling
from ..checkpoint.stacked_experts import StackedExperts
from ..network.network import Network

# Hugging Face's names of the exact GELU and of its approximation by tanh.
GELU_TANH_NAMES = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
GELUS = {"gelu": "gelu", **dict.fromkeys(GELU_TANH_NAMES, "gelu_tanh")}


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(CheckpointConfig):
    """Of families that rotate a share of each head."""

    rotary_pct: float = 1.0

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_size * self.rotary_pct)

    def inconsistencies(self) -> list[str]:
        """What is wrong between fields that are each acceptable alone."""
        found = super().inconsistencies()
        if not 0 < self.rotary_pct <= 1:
            return [*found, f"rotary_pct is {self.rotary_pct}; expected a share of the head, above 0 up to 1"]
        if not 2 <= self.rotary_size <= self.head_size or self.rotary_size % 2 != 0:
            found.append(
                f"rotary_pct {self.rotary_pct} of head_size {self.head_size} is not an even number of elements"
            )
        return found


FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

Features = dict[str, Any]
"""Fields of the family's CheckpointConfig, by name, in which it differs from others."""

# Buffers that old versions of transformers saved, and that follow from config.json.
ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """What a model that sees has beside its language model, which alone is served, for text."""

    tensor_prefixes: tuple[str, ...]
    """What the names of its tensors begin with; conversion leaves them aside."""
    fields: frozenset[str]
    """Of config.json, beside text_config: what images and videos alone need."""
    text_model_types: frozenset[str]
    """What text_config's model_type can be."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that text_config of published models leaves out."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One architecture of Hugging Face's config.json."""

    architecture: str
    """The class that FAMILIES knows it by: of an encoder alone the model without a head."""
    read_features: Callable[[JsonFields, int], Features]
    """Takes the family's own fields; the second argument is num_hidden_layers."""
    declare: Callable[[Network, Any], None]
    """Declares the network of a config of `config_class`."""
    config_class: type[CheckpointConfig] = CheckpointConfig
    optional_fields: frozenset[str] = frozenset()
    """num_key_value_heads and head_dim, where the family derives them from other sizes if left out."""
    neutral_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the family does not have, with the value at which they mean nothing; others are refused."""
    ignored_tensors: tuple[str, ...] = (ROTARY_BUFFERS,)
    """Patterns of tensors that a model may have and that follow from config.json."""
    inner_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of paths, as files have them, with what transformers calls them in a model that is loaded."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """What names of tensors and of adapters' layers began with in older layouts, and begin with today."""
    older_endings: Mapping[str, str] = field(default_factory=dict)
    """What names of tensors ended with, and end with today."""
    stacked_experts: StackedExperts = field(default_factory=dict)
    """How models hold the linear layers of experts that are apart in their networks, where they do not hold them so."""
    bare_architectures: frozenset[str] = frozenset()
    """Classes whose heads are left aside, so that they are the model without one."""
    fitting: Callable[[Any, Container[str]], Any] | None = None
    """The config, of the config.json's and the names of a model's tensors, where it is they that tell."""
    vision: VisionTower | None = None
    """Of models that see as well; the language model alone is served."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Names of fields that other families have under those that are the keys."""
    harmless_fields: frozenset[str] = frozenset()
    """Fields of the family that do not change what the network computes."""
    published_code: Mapping[str, str] = field(default_factory=dict)
    """Entries of auto_map in the family's own published models: code that has since become transformers' class."""
    default_rope_theta: float = 10000.0
    """rope_theta where it is left out."""
    mrope: bool = False
    """Rotary positions have three rows: of time, height and width."""
    tied_by_default: bool = False
    """tie_word_embeddings where it is left out."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu"})
    """Values of hidden_act with those of CheckpointConfig.hidden_act; the first where it is left out."""
    position_embedding_type: str = ROPE
    unused_positions: Callable[[JsonFields], int] | None = None
    """Of max_position_embeddings, those that no token has; None: every one can be a token's."""
    partial_rotary_factor: float | None = None
    """Where it is left out; None: heads are always rotated whole."""
    fill_in: Callable[[JsonFields], Mapping[str, Any]] | None = None
    """What transformers takes for fields that are left out, by name, where that depends on others."""
    lm_head_is_embedding: Callable[[Any, bool], bool] | None = None
    """Of a config and whether the model has an lm_head of its own; None: tie_word_embeddings alone tells."""
    read_rope: Callable[[JsonFields, int], Features] | None = None
    """Reads the family's own fields of rotary positions; the second argument is max_position_embeddings."""


def no_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    """Of families that tell positions in another way."""
    return {"rotary_base": 10000.0}


def sliding_window_of_all_layers(fields: JsonFields, num_hidden_layers: int) -> Features:
    """One window for every layer, or null."""
    if "sliding_window" not in fields:
        fields.problem("sliding_window", "is missing; expected an integer, or null for full attention")
        return {}
    window = fields.optional_integer("sliding_window")
    return {
        "sliding_window": window,
        "sliding_window_layers": () if window is None else tuple(range(num_hidden_layers)),
    }


def sliding_window_by_layer(
    fields: JsonFields, num_hidden_layers: int, has_window: Callable[[int], bool] | None = None
) -> Features:
    """A window, if use_sliding_window, for the layers that layer_types names.

    Without layer_types it is for those that `has_window` says, by number, or else those from max_window_layers on.
    """
    enabled = fields.boolean("use_sliding_window", default=False)
    # transformers 5 writes 0 where the window is not used.
    declared = fields.optional_integer("sliding_window", minimum=1 if enabled else 0)
    layer_types = fields.raw("layer_types")
    decides = enabled and layer_types is None and has_window is None
    first = fields.integer("max_window_layers", minimum=0, default=None if decides else num_hidden_layers)
    if enabled and "sliding_window" not in fields:
        fields.problem("sliding_window", "is missing, but use_sliding_window is true")
    window = declared if enabled else None
    if layer_types is not None:
        layers = sliding_layers(fields, layer_types, num_hidden_layers)
    elif window is None:
        layers = ()
    else:
        layers = tuple(
            layer for layer in range(num_hidden_layers) if (layer >= first if has_window is None else has_window(layer))
        )
    if layers and window is None:
        fields.problem("layer_types", f"has {SLIDING_ATTENTION}, but there is no sliding_window in use")
    return {"sliding_window": window if layers else None, "sliding_window_layers": layers}


def sliding_window_of_kinds(fields: JsonFields, num_hidden_layers: int, has_window: Callable[[int], bool]) -> Features:
    """A window for the layers that layer_types names; without it for those that `has_window` says, by number."""
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        layers = tuple(layer for layer in range(num_hidden_layers) if has_window(layer))
    else:
        layers = sliding_layers(fields, layer_types, num_hidden_layers)
    window = fields.optional_integer("sliding_window")
    if layers and window is None:
        fields.problem("sliding_window", f"is missing, but there are layers of {SLIDING_ATTENTION}")
    return {"sliding_window": window if layers else None, "sliding_window_layers": layers}


def read_rope_of_kinds(
    fields: JsonFields,
    max_position_embeddings: int,
    base: float,
    local_base: float,
    names: tuple[str, str] = ("rope_theta", "rope_local_base_freq"),
) -> Features:
    """Rotary positions of families whose layers with a window have a base of their own, rotary_local_base.

    transformers 5 has parameters for each kind of layer, versions before it a base for each, `names`, and one scaling.
    `base` and `local_base` are those of what is left out.
    """
    theta = fields.optional_number(names[0], above=True) or base
    local = fields.optional_number(names[1], above=True) or local_base
    scaling = fields.object("rope_scaling", optional=True)
    parameters = fields.object("rope_parameters", optional=True)
    if parameters is not None:
        whole = parameters.object(FULL_ATTENTION)
        windowed = parameters.object(SLIDING_ATTENTION)
        if whole is not None and windowed is not None:
            theta = whole.number("rope_theta", above=True)
            local = windowed.number("rope_theta", above=True)
            scaling = whole
            if read_rotary_scaling(windowed, max_position_embeddings) is not None:
                windowed.problem("rope_type", "is not default, which is all that layers with a window can have")
    return {
        "rotary_base": theta,
        "rotary_local_base": local,
        "rotary_scaling": None if scaling is None else read_rotary_scaling(scaling, max_position_embeddings),
    }


def sliding_layers(fields: JsonFields, layer_types: object, num_hidden_layers: int) -> tuple[int, ...]:
    """The layers that layer_types gives a window."""
    if (
        isinstance(layer_types, list)
        and len(layer_types) == num_hidden_layers
        and all(kind in (FULL_ATTENTION, SLIDING_ATTENTION) for kind in layer_types)
    ):
        return tuple(layer for layer, kind in enumerate(layer_types) if kind == SLIDING_ATTENTION)
    fields.problem(
        "layer_types",
        f"is {describe(layer_types)}; expected {num_hidden_layers} times {FULL_ATTENTION} or {SLIDING_ATTENTION}",
    )
    return ()
