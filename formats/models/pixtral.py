"""Pixtral's vision tower with Mistral 3's connector: rotation by row and column, gated MLPs, squares of patches merged.

The connector is a layer after those of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.ops import PatchEmbedding
from ..network.weights import Split, Tensor, TensorName, whole
from .clip import used_layers
from .decoder import dense_mlp, qkv_parts
from .family import GELUS, Features, ModelFamily
from .llava import CONNECTOR_PATH, LLAVA_DECODER, LLAVA_OLDER_NAMES, TOWER_PATH
from .tower import TowerConfig, vision_fields

_DEFAULTS: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
"""transformers' defaults of vision_config."""
_MODEL_TYPE: Final = "pixtral"
_IMAGE_TOKEN: Final = 10
_LAYER: Final = -1
_MERGE: Final = 2
"""transformers' defaults."""
_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 10000.0
_MOST_PATCHES: Final = 1 << 20
"""Limit of an image's patches; the settings of the image processor and the language model allow fewer."""
NUM_COORDINATES: Final = 3
"""Coordinates of a patch's row: row, column, and none for the text after it."""
_LAYERS: Final = (
    *(f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
"""Linear layers of each layer."""


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(TowerConfig):
    """Fields of Pixtral's tower with Mistral 3's connector, which is the last layer."""

    merge_size: int = 1
    """A row of the language model is made from merge_size * merge_size neighbouring patches."""
    connector_act: str = "gelu"
    connector_bias: bool = False
    connector_epsilon: float = _EPSILON
    num_unused_layers: int | None = None
    """Number of the model's layers after those that are used; None: 0."""

    @property
    def tokens_per_row(self) -> int:
        """Number of the tower's tokens for each row of the language model."""
        return self.merge_size**2

    @property
    def factor(self) -> int:
        """Height and width of the pixels that become one row of the language model."""
        return self.patch_size * self.merge_size


def tower_fields(model: Mapping[str, Any], text: CheckpointConfig) -> dict[str, Any] | None:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it.

    None for towers other than Pixtral's. Raises CheckpointError for rows of several layers.
    """
    own = vision_fields(model, _DEFAULTS)
    if own.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
        return None
    used = used_layers(model.get("vision_feature_layer", _LAYER), own["num_hidden_layers"])
    return {
        **own,
        "num_hidden_layers": used + 1,
        "num_unused_layers": own["num_hidden_layers"] - used,
        "architectures": [PIXTRAL_TOWER.architecture],
        "vocab_size": own["hidden_size"],
        "max_position_embeddings": _MOST_PATCHES,
        "rms_norm_eps": _EPSILON,
        "connector_epsilon": text.norm_epsilon,
        "projection_size": text.hidden_size,
        "image_token_id": model.get("image_token_index", model.get("image_token_id", _IMAGE_TOKEN)),
        **{name: model[name] for name in _OF_MODEL if model.get(name) is not None},
    }


_OF_MODEL: Final = ("spatial_merge_size", "projector_hidden_act", "multimodal_projector_bias")
"""Fields next to vision_config that the tower needs."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    act = fields.string("projector_hidden_act", choices=GELUS, default="gelu")
    return {
        "image_size": fields.integer("image_size"),
        "patch_size": fields.integer("patch_size", maximum=1 << 10),
        "num_channels": fields.integer("num_channels", maximum=3, minimum=3),
        "projection_size": fields.integer("projection_size"),
        "image_token_id": fields.integer("image_token_id", minimum=0),
        "merge_size": fields.integer("spatial_merge_size", maximum=1 << 5, default=_MERGE),
        "num_unused_layers": fields.integer("num_unused_layers", minimum=0) or None,
        "connector_epsilon": fields.number("connector_epsilon"),
        "connector_act": GELUS.get(act, "gelu"),
        "connector_bias": fields.boolean("multimodal_projector_bias", default=False),
    }


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    theta = fields.optional_number("rope_theta", above=True)
    parameters = fields.object("rope_parameters", optional=True)
    if parameters is not None:
        parameters.string("rope_type", choices=("axial", "default"), default="axial")
        theta = parameters.number("rope_theta", above=True, default=_ROPE_THETA)
    return {"rotary_base": _ROPE_THETA if theta is None else theta}


def _declare(net: Network, c: PixtralConfig) -> None:
    for path in (LLAVA_DECODER, "lm_head"):
        net.leave_to_other(path)
    layers = f"{TOWER_PATH}.transformer.layers"
    shape = (c.hidden_size, c.num_channels, c.patch_size, c.patch_size)
    net.patches = PatchEmbedding(
        weight=Tensor(TensorName("patches.weight"), f"{TOWER_PATH}.patch_conv.weight", shape),
        bias=None,
        positions=None,
    )
    # A request's embeddings replace every row; the table only gives them their width.
    x = net.embedding(f"{layers}.0.attention.o_proj", adapted=False, num_coordinates=NUM_COORDINATES)
    x = net.rms_norm(x, f"{TOWER_PATH}.ln_pre", "ln_pre", is_stream=True)
    row, column, quarter = c.hidden_size, c.hidden_size + 1, c.head_size // 4
    rotary = net.rotary(columns=(row,) * quarter + (column,) * (c.head_size // 2 - quarter), is_in_turn=True)
    connector = c.num_hidden_layers - 1
    for layer in net.layers():
        if layer == connector:
            rows = _connector(net, c, x)
        else:
            x = _layer(net, c, x, f"{layers}.{layer}", rotary)
    with net.scope("head"):
        net.hidden = net.join_columns([rows])
    for layer in range(connector, connector + (c.num_unused_layers or 0)):
        for name in _LAYERS:
            net.leave_aside(f"{layers}.{layer}.{name}")


def _layer(net: Network, c: PixtralConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    with net.scope("attention"):
        h = net.rms_norm(x, f"{p}.attention_norm", "input_layernorm")
        qkv = net.linear(h, "attention.qkv", qkv_parts(c, f"{p}.attention"), split=Split.COLUMN)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.attention.o_proj", "attn_dense", c.hidden_size)
        x = net.linear(attended, "attention.dense", [dense], split=Split.ROW, add_to=x)
    with net.scope("mlp"):
        h = net.rms_norm(x, f"{p}.ffn_norm", "post_layernorm")
        return dense_mlp(net, c, h, x, f"{p}.feed_forward")


def _connector(net: Network, c: PixtralConfig, x: Value) -> Value:
    p = CONNECTOR_PATH
    h = net.rms_norm(x, f"{p}.norm", "input_layernorm", epsilon=c.connector_epsilon)
    h = net.join_neighbours(h, c.merge_size**2)
    merge = whole(f"{p}.patch_merger.merging_layer", "attn_dense", c.hidden_size, joined_rows=c.merge_size**2)
    h = net.cast(net.linear(h, "connector.merge", [merge], split=Split.COLUMN))
    first = whole(f"{p}.linear_1", "mlp_h_to_4h", c.projection_size)
    act = Activation(c.connector_act)
    h = net.linear(h, "connector.fc", [first], split=Split.COLUMN, bias=c.connector_bias, activation=act)
    second = whole(f"{p}.linear_2", "mlp_4h_to_h", c.projection_size)
    return net.linear(h, "connector.proj", [second], split=Split.COLUMN, bias=c.connector_bias)


PIXTRAL_TOWER: Final = ModelFamily(
    architecture="PixtralVisionModel",
    config_class=PixtralConfig,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=_declare,
    activations={"silu": "silu", **GELUS},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    older_names=LLAVA_OLDER_NAMES,
    # The language model, and layers after the used ones.
    ignored_tensors=(
        r"(model\.language_model|lm_head)\..*",
        r"model\.vision_tower\.transformer\.layers\.\d+\..*",
    ),
)
