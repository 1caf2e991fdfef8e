"""Description of a model family, and readers of config.json fields that several families share.

A family reads the fields of Hugging Face's config.json into a CheckpointConfig, and declares its network. Names of
tensors, shards, adapters, the program and the ONNX graph follow from that declaration.
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
    """Config of families that rotate a share of each head."""

    rotary_pct: float = 1.0

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated."""
        return int(self.head_size * self.rotary_pct)

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
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
"""Fields of the family's CheckpointConfig that differ from the defaults, by name."""

# Buffers that old versions of transformers saved; they follow from config.json.
ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """Parts of a vision model outside of its language model. Without `family`, images are refused."""

    tensor_prefixes: tuple[str, ...]
    """Prefixes of its tensor names; conversion skips these tensors."""
    fields: frozenset[str]
    """Fields of config.json, outside of text_config, that only images and videos need."""
    text_model_types: frozenset[str]
    """Accepted values of text_config's model_type."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of fields that published models omit from text_config."""
    family: ModelFamily | None = None
    """Family of the tower's network; None: only the language model is served."""
    tower_fields: Callable[[Mapping[str, Any], CheckpointConfig], Mapping[str, Any] | None] | None = None
    """Returns the tower's own fields in the form of a config.json, from the model's and the language model's config.

    None: this tower is not served.
    """


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One architecture of Hugging Face's config.json."""

    architecture: str
    """Class name, the key in FAMILIES. For encoders, the model without a head."""
    read_features: Callable[[JsonFields, int], Features]
    """Reads the family's own fields; the second argument is num_hidden_layers."""
    declare: Callable[[Network, Any], None]
    """Declares the network of a config of `config_class`."""
    config_class: type[CheckpointConfig] = CheckpointConfig
    optional_fields: frozenset[str] = frozenset()
    """Fields among num_key_value_heads and head_dim that the family derives from other sizes if they are missing."""
    neutral_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the family does not have, with the only accepted value, at which they mean nothing."""
    ignored_tensors: tuple[str, ...] = (ROTARY_BUFFERS,)
    """Patterns of names of tensors that a model may have, and that conversion ignores."""
    prediction_tensors: str | None = None
    """Pattern of names of tensors of heads that predict several tokens, which are not used. None: there are none."""
    inner_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of paths in files, with transformers' names in a loaded model."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names of tensors and adapter layers in older layouts, with the current ones."""
    older_endings: Mapping[str, str] = field(default_factory=dict)
    """Older ends of tensor names, with the current ones."""
    fused_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers of files that hold several layers of the model, by the end of their path."""
    stacked_experts: StackedExperts | None = None
    """Parameters of the model that hold linear layers of all experts; the network has them per expert. None: none."""
    joined_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ends of names of tensors, with those of tensors in files whose rows follow one another in them."""
    bare_architectures: frozenset[str] = frozenset()
    """Classes whose heads are ignored: they count as the model without a head."""
    fitting: Callable[[Any, Container[str]], Any] | None = None
    """Returns the config adjusted to the names of a model's tensors, if config.json does not say enough."""
    vision: VisionTower | None = None
    """Vision tower of models that also take images; only the language model is served."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The family's names of fields, by the names that other families use."""
    harmless_fields: frozenset[str] = frozenset()
    """Fields of the family that do not change what the network computes."""
    published_code: Mapping[str, str] = field(default_factory=dict)
    """Entries of auto_map in the family's published models: code that has since become transformers' class."""
    default_rope_theta: float = 10000.0
    """Default of rope_theta."""
    mrope: bool = False
    """True if rotary positions have three rows: time, height and width."""
    query_scaling: bool = False
    """True if llama_4_scaling_beta scales queries by their position; the config has query_scaling_beta."""
    alpha_scaling: bool = False
    """True if rope_type dynamic with `alpha` means a larger rope_theta, whatever the length is."""
    tied_by_default: bool = False
    """Default of tie_word_embeddings."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu"})
    """Values of hidden_act, with those of CheckpointConfig.hidden_act; the first is the default."""
    position_embedding_type: str = ROPE
    unused_positions: Callable[[JsonFields], int] | None = None
    """Number of positions in max_position_embeddings that no token can have; None: 0."""
    partial_rotary_factor: float | None = None
    """Default share of a head that is rotated; None: heads are always rotated whole."""
    fill_in: Callable[[JsonFields], Mapping[str, Any]] | None = None
    """transformers' defaults of missing fields, by name, if they depend on other fields."""
    lm_head_is_embedding: Callable[[Any, bool], bool] | None = None
    """True if lm_head is the embedding, for a config and a model that has its own lm_head or not.

    None: use tie_word_embeddings.
    """
    read_rope: Callable[[JsonFields, int], Features] | None = None
    """Reads the family's own fields of rotary positions; the second argument is max_position_embeddings."""


def no_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    """For families without rotary positions."""
    return {"rotary_base": 10000.0}


def sliding_window_of_all_layers(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Reads one window for all layers, or null."""
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
    """Reads a window, if use_sliding_window, for the layers that layer_types names.

    Without layer_types, for layers where `has_window` is true, or else from layer max_window_layers on.
    """
    enabled = fields.boolean("use_sliding_window", default=False)
    # transformers 5 writes 0 if the window is not used.
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
    """Reads a window for the layers that layer_types names, by default those where `has_window` is true."""
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
    """Reads rotary positions of families with another base, rotary_local_base, in layers with a window.

    transformers 5 has parameters per kind of layer. Earlier versions have a base for each kind (`names`) and one
    scaling. `base` and `local_base` are the defaults.
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
                windowed.problem("rope_type", "is not default; layers with a window accept only default")
    return {
        "rotary_base": theta,
        "rotary_local_base": local,
        "rotary_scaling": None if scaling is None else read_rotary_scaling(scaling, max_position_embeddings),
    }


def sliding_layers(fields: JsonFields, layer_types: object, num_hidden_layers: int) -> tuple[int, ...]:
    """Returns the layers that have a window according to layer_types."""
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
