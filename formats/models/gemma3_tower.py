"""Gemma 3's vision tower: SigLIP, whose neighbouring rows are averaged, normalised and projected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from ..network.weights import Tensor, TensorName
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
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""transformers' defaults of vision_config."""
_MODEL_TYPE: Final = "siglip_vision_model"
_IMAGE_TOKEN: Final = 262144
_ROWS: Final = 256
"""transformers' defaults."""


@dataclass(frozen=True, kw_only=True)
class Gemma3TowerConfig(TowerConfig):
    """Fields of Gemma 3's tower."""

    rows_per_image: int = 1
    """Number of rows of the language model that a square image becomes."""

    @property
    def pool_size(self) -> int:
        """Height and width of the squares of patches that become a row."""
        return max(self.patches_per_side // isqrt(self.rows_per_image), 1)

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if not found and (self.pool_size**2) * self.rows_per_image != self.patches_per_side**2:
            found.append(
                f"mm_tokens_per_image is {self.rows_per_image}; expected squares of patches of an image of "
                f"{self.patches_per_side} x {self.patches_per_side} patches"
            )
        return found


def tower_fields(model: Mapping[str, Any], text: CheckpointConfig) -> dict[str, Any] | None:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it.

    None for towers other than SigLIP's.
    """
    own = vision_fields(model, _DEFAULTS)
    if own.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
        return None
    return {
        **fields_of_tower(own, GEMMA3_TOWER.architecture, patches_of(own), text),
        "image_token_id": model.get("image_token_index", model.get("image_token_id", _IMAGE_TOKEN)),
        "mm_tokens_per_image": model.get("mm_tokens_per_image", _ROWS),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **read_tower_features(fields, num_hidden_layers),
        "rows_per_image": fields.integer("mm_tokens_per_image", maximum=1 << 16),
    }


def _declare(net: Network, c: Gemma3TowerConfig) -> None:
    for path in (LLAVA_DECODER, "lm_head"):
        net.leave_to_other(path)
    x = given_patches(net, c, f"{TOWER_PATH}.embeddings", num_positions=c.patches_per_side**2)
    net.leave_aside(f"{TOWER_PATH}.head")
    assert net.patches is not None
    norm, matrix = f"{CONNECTOR_PATH}.mm_soft_emb_norm.weight", f"{CONNECTOR_PATH}.mm_input_projection_weight"
    net.patches = replace(
        net.patches,
        pooled_norm=Tensor(TensorName("patches.pooled_norm"), norm, (c.hidden_size,), plus_one=True),
        pooled_projection=Tensor(TensorName("patches.pooled_projection"), matrix, (c.hidden_size, c.projection_size)),
    )
    x = vision_layers(net, c, x, f"{TOWER_PATH}.encoder.layers")
    with net.scope("head"):
        net.hidden = net.layer_norm(x, f"{TOWER_PATH}.post_layernorm", "transformer.ln_f", logit_rows=True)


GEMMA3_TOWER: Final = ModelFamily(
    architecture="SiglipVisionModel",
    config_class=Gemma3TowerConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    position_embedding_type=LEARNED_POSITIONS,
    activations={**GELUS, "relu": "relu"},
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    older_names=CLIP_OLDER_NAMES,
    harmless_fields=frozenset({"vision_use_head"}),
    # The language model, and the head of pooling that other SigLIP models have.
    ignored_tensors=(r"(model\.language_model|lm_head|model\.vision_tower\.head)\..*",),
)
