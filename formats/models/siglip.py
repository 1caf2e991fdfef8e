"""SigLIP's vision tower: learned positions, pre-norm layers with biases, and a last norm.

The rows of patches are made outside of the program (runtime/images/), because they depend on an image's size. So is
the projection: it reads several neighbouring rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.config import LEARNED_POSITIONS, CheckpointConfig
from ..network.network import Network
from ..network.operands import Value
from .decoder import plain_mlp
from .family import GELUS, Features, ModelFamily, no_rope
from .tower import TowerConfig, patches_of, read_tower_features, vision_fields, vision_layer

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
    num_patches = patches_of(own)
    return {
        **own,
        "architectures": [architecture],
        "vocab_size": num_patches,
        "max_position_embeddings": num_patches,
        "scale_factor": model.get("scale_factor", 2),
        "projection_size": text.hidden_size,
        "image_token_id": model.get("image_token_id", _IMAGE_TOKEN_ID),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**read_tower_features(fields, num_hidden_layers), "merge_size": fields.integer("scale_factor")}


def _declare(net: Network, c: SiglipConfig) -> None:
    for path in _TEXT:
        net.leave_to_other(path)
    embeddings = f"{TOWER_PATH}.embeddings"
    positions = f"{embeddings}.position_embedding"
    net.embed_patches(
        f"{embeddings}.patch_embedding",
        positions,
        channels=c.num_channels,
        patch_size=c.patch_size,
        num_positions=c.patches_per_side**2,
    )
    # A request's embeddings replace every row; the table only gives them their width.
    x = net.embedding(positions, adapted=False)
    rotary = net.no_rotation()
    for layer in net.layers():
        x = vision_layer(net, c, x, f"{TOWER_PATH}.encoder.layers.{layer}", rotary, partial(_mlp, net, c))
    with net.scope("head"):
        net.hidden = net.layer_norm(x, f"{TOWER_PATH}.post_layernorm", "transformer.ln_f", logit_rows=True)
    net.project(_PROJECTION, inputs=c.hidden_size * c.merge_size**2, outputs=c.projection_size)


def _mlp(net: Network, c: SiglipConfig, h: Value, x: Value, path: str) -> Value:
    return plain_mlp(net, c, h, x, path, ("fc1", "fc2"))


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
