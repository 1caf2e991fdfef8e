"""CLIP's vision tower with LLaVA's connector: a class token, learned positions, a norm before the layers, none after.

The language model reads the rows of one layer. Later layers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields, describe
from ..checkpoint.activation import Activation
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from ..network.weights import Split, whole
from .decoder import plain_mlp
from .family import GELUS, Features, ModelFamily, no_rope
from .llava import CLIP_OLDER_NAMES, CONNECTOR_PATH, LLAVA_DECODER, TOWER_PATH
from .tower import (
    TowerConfig,
    fields_of_tower,
    given_patches,
    patches_of,
    read_tower_features,
    vision_fields,
    vision_layers,
)

_DEFAULTS: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""transformers' defaults of vision_config."""
_MODEL_TYPE: Final = "clip_vision_model"
_IMAGE_TOKEN: Final = 32000
"""transformers' default."""
_LAYER: Final = -2
"""transformers' default of vision_feature_layer."""
_WITHOUT_CLASS: Final = "default"
_STRATEGIES: Final = (_WITHOUT_CLASS, "full")
_QUICK: Final = 1.702
_LAYERS: Final = (*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")), "mlp.fc1", "mlp.fc2")
"""Linear layers of each layer."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig(TowerConfig):
    """Fields of CLIP's tower with LLaVA's connector."""

    keeps_class: bool = False
    """True if the class token's row is one of the language model's."""
    connector_act: str = "gelu"
    connector_bias: bool = True
    num_unused_layers: int | None = None
    """Number of the model's layers after those that are used; None: 0."""

    @property
    def num_positions(self) -> int:
        """Number of positions: those of patches, and the class token's."""
        return 1 + self.patches_per_side**2


def tower_fields(model: Mapping[str, Any], text: CheckpointConfig) -> dict[str, Any] | None:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it.

    None for towers other than CLIP's. Raises CheckpointError for rows of several layers.
    """
    own = vision_fields(model, _DEFAULTS)
    if own.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
        return None
    used = used_layers(model.get("vision_feature_layer", _LAYER), own["num_hidden_layers"])
    return {
        **fields_of_tower(own, CLIP_TOWER.architecture, 1 + patches_of(own), text),
        "num_hidden_layers": used,
        "num_unused_layers": own["num_hidden_layers"] - used,
        "image_token_id": model.get("image_token_index", model.get("image_token_id", _IMAGE_TOKEN)),
        **{name: model[name] for name in _OF_MODEL if model.get(name) is not None},
    }


_OF_MODEL: Final = ("vision_feature_select_strategy", "projector_hidden_act", "multimodal_projector_bias")
"""Fields next to vision_config that the tower needs."""


def used_layers(stated: Any, num_layers: Any) -> int:
    """Returns the number of layers up to the one whose rows are read; negative numbers count from the last layer."""
    is_number = isinstance(stated, int) and not isinstance(stated, bool)
    used = 0
    if is_number and isinstance(num_layers, int):
        used = stated if stated >= 0 else num_layers + 1 + stated
    if used < 1 or used > num_layers:
        raise CheckpointError(
            f"config.json: vision_feature_layer is {describe(stated)}, and the tower's num_hidden_layers is "
            f"{describe(num_layers)}; expected the number of one of the layers, from 1 or from -1 on"
        )
    return used


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    strategy = fields.string("vision_feature_select_strategy", choices=_STRATEGIES, default=_WITHOUT_CLASS)
    act = fields.string("projector_hidden_act", choices=GELUS, default="gelu")
    return {
        **read_tower_features(fields, num_hidden_layers),
        "num_unused_layers": fields.integer("num_unused_layers", minimum=0) or None,
        "keeps_class": strategy != _WITHOUT_CLASS,
        "connector_act": GELUS.get(act, "gelu"),
        "connector_bias": fields.boolean("multimodal_projector_bias", default=True),
    }


def _declare(net: Network, c: ClipConfig) -> None:
    net.leave_to_other(LLAVA_DECODER)
    net.leave_to_other("lm_head")
    embeddings = f"{TOWER_PATH}.embeddings"
    first = f"{embeddings}.class_embedding"
    x = given_patches(net, c, embeddings, num_positions=c.num_positions, bias=False, first=first)
    x = net.layer_norm(x, f"{TOWER_PATH}.pre_layrnorm", "pre_layernorm", is_stream=True)
    x = vision_layers(net, c, x, f"{TOWER_PATH}.encoder.layers", partial(quick_mlp, net, c))
    with net.scope("head"):
        net.hidden = net.scaled(_connector(net, c, x), logit_rows=True)
    for layer in range(c.num_hidden_layers, c.num_hidden_layers + (c.num_unused_layers or 0)):
        for name in _LAYERS:
            net.leave_aside(f"{TOWER_PATH}.encoder.layers.{layer}.{name}")


def _connector(net: Network, c: ClipConfig, x: Value) -> Value:
    layers = (("linear_1", "cross_attn_q", Activation(c.connector_act)), ("linear_2", "cross_attn_dense", None))
    with net.scope("connector"):
        x = net.cast(x)
        for name, module, activation in layers:
            x = net.linear(
                x,
                f"connector.{name}",
                [whole(f"{CONNECTOR_PATH}.{name}", module, c.projection_size)],
                split=Split.COLUMN,
                bias=c.connector_bias,
                activation=activation,
                adapted_layer=0,  # adapters see them as modules that the layers of a tower do not have
            )
    return x


def quick_mlp(net: Network, c: TowerConfig, h: Value, x: Value, path: str) -> Value:
    """Declares `x` plus the output of an MLP of two layers, fc1 and fc2, whose activation may be quick GELU."""
    if Activation(c.hidden_act) is not Activation.QUICK_GELU:
        return plain_mlp(net, c, h, x, path, ("fc1", "fc2"))
    up = whole(f"{path}.fc1", "mlp_h_to_4h", c.intermediate_size)
    made = net.linear(h, "mlp.fc", [up], split=Split.COLUMN, bias=True)
    made = net.sigmoid_gate(net.cast(made), net.scaled(made, _QUICK, is_stream=True))
    down = whole(f"{path}.fc2", "mlp_4h_to_h", c.hidden_size)
    return net.linear(made, "mlp.proj", [down], split=Split.ROW, bias=True, add_to=x)


CLIP_TOWER: Final = ModelFamily(
    architecture="CLIPVisionModel",
    config_class=ClipConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    position_embedding_type=LEARNED_POSITIONS,
    activations={**GELUS, "quick_gelu": "quick_gelu", "relu": "relu"},
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    older_names=CLIP_OLDER_NAMES,
    harmless_fields=frozenset({"initializer_factor", "projection_dim"}),
    # The language model, the unused norm, and layers after the used ones.
    ignored_tensors=(
        r"(model\.language_model|lm_head|model\.vision_tower\.post_layernorm)\..*",
        r"model\.vision_tower\.encoder\.layers\.\d+\..*",
        r"model\.vision_tower\.embeddings\.position_ids",
    ),
)
