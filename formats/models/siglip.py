"""SigLIP's vision tower: learned positions, pre-norm layers with biases, and a last norm.

The rows of patches are made outside of the program (runtime/images/), because they depend on an image's size. So is
the projection: it reads several neighbouring rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from .family import GELUS, Features, ModelFamily, no_rope
from .tower import (
    TowerConfig,
    fields_of_tower,
    given_patches,
    patches_of,
    read_tower_features,
    vision_fields,
    vision_layers,
)

TOWER_PATH: Final = "model.vision_model"
"""Path of the tower in the Hugging Face model."""
_PROJECTION: Final = "model.connector.modality_projection.proj"
_DEFAULTS: Final = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""transformers' defaults of vision_config."""
_IMAGE_TOKEN_ID: Final = 128257
"""transformers' default."""
_TEXT: Final = ("model.text_model", "lm_head")
"""Paths of the language model, which uses its own part of each adapter."""


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(TowerConfig):
    """Fields of a tower whose neighbouring rows are joined."""

    merge_size: int = 1
    """A row of the language model is made from merge_size * merge_size neighbouring patches."""

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if not found and self.patches_per_side % self.merge_size != 0:
            found.append(
                f"scale_factor is {self.merge_size}; expected a divisor of {self.patches_per_side}, the number of "
                "patches in a row"
            )
        return found


def tower_fields(model: Mapping[str, Any], text: CheckpointConfig, architecture: str) -> dict[str, Any]:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it."""
    own = vision_fields(model, _DEFAULTS)
    return {
        **fields_of_tower(own, architecture, patches_of(own), text),
        "scale_factor": model.get("scale_factor", 2),
        "image_token_id": model.get("image_token_id", _IMAGE_TOKEN_ID),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**read_tower_features(fields, num_hidden_layers), "merge_size": fields.integer("scale_factor")}


def _declare(net: Network, c: SiglipConfig) -> None:
    for path in _TEXT:
        net.leave_to_other(path)
    x = given_patches(net, c, f"{TOWER_PATH}.embeddings", num_positions=c.patches_per_side**2)
    x = vision_layers(net, c, x, f"{TOWER_PATH}.encoder.layers")
    with net.scope("head"):
        net.hidden = net.layer_norm(x, f"{TOWER_PATH}.post_layernorm", "transformer.ln_f", logit_rows=True)
    net.project(_PROJECTION, inputs=c.hidden_size * c.merge_size**2, outputs=c.projection_size)


SMOLVLM_TOWER = ModelFamily(
    architecture="SmolVLMVisionTransformer",
    config_class=SiglipConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    position_embedding_type=LEARNED_POSITIONS,
    activations={**GELUS, "relu": "relu"},
    field_names={"rms_norm_eps": "layer_norm_eps"},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    harmless_fields=frozenset({"max_image_size", "size", "use_base_siglip"}),
    # The language model, and the head of pooling that other SigLIP models have.
    ignored_tensors=(r"(model\.text_model|lm_head|model\.vision_model\.head)\..*",),
)

IDEFICS3_TOWER = replace(SMOLVLM_TOWER, architecture="Idefics3VisionTransformer")
