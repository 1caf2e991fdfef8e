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
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import plain_mlp
from .encoder import EncoderConfig
from .family import GELUS, Features, ModelFamily, no_rope

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
class SiglipConfig(EncoderConfig):
    """Fields of a tower, in addition to those of other encoders."""

    image_size: int = 1
    """Height and width of the images that positions were trained for."""
    patch_size: int = 1
    num_channels: int = 3
    merge_size: int = 1
    """A row of the language model is made from merge_size * merge_size neighbouring patches."""
    projection_size: int = 1
    """Width of the language model's hidden states."""
    image_token_id: int = 0
    """Token of the language model that stands for a row of an image."""

    @property
    def patches_per_side(self) -> int:
        """Number of patches in a row of patches."""
        return self.image_size // self.patch_size

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.patch_size > self.image_size:
            found.append(f"patch_size is {self.patch_size}; expected at most image_size {self.image_size}")
        elif self.patches_per_side % self.merge_size != 0:
            found.append(
                f"scale_factor is {self.merge_size}; expected a divisor of {self.patches_per_side}, the number of "
                "patches in a row"
            )
        return found


def tower_fields(model: Mapping[str, Any], text: CheckpointConfig, architecture: str) -> dict[str, Any]:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it."""
    given = model.get("vision_config")
    own = {**_DEFAULTS, **{name: value for name, value in (given or {}).items() if value is not None}}
    size, patch = own["image_size"], own["patch_size"]
    countable = isinstance(size, int) and isinstance(patch, int) and patch > 0
    num_patches = max((size // patch) ** 2, 1) if countable else 1
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
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "image_size": fields.integer("image_size"),
        "patch_size": fields.integer("patch_size"),
        "num_channels": fields.integer("num_channels", maximum=3, minimum=3),
        "merge_size": fields.integer("scale_factor"),
        "projection_size": fields.integer("projection_size"),
        "image_token_id": fields.integer("image_token_id", minimum=0),
    }


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
        num_patches=c.patches_per_side**2,
    )
    # A request's embeddings replace every row; the table only gives them their width.
    x = net.embedding(positions, adapted=False)
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{TOWER_PATH}.encoder.layers.{layer}"
        x = _attention(net, c, x, p, rotary)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.layer_norm2", "post_layernorm")
            x = plain_mlp(net, c, h, x, f"{p}.mlp", ("fc1", "fc2"))
    with net.scope("head"):
        net.hidden = net.layer_norm(x, f"{TOWER_PATH}.post_layernorm", "transformer.ln_f", logit_rows=True)
    net.project(_PROJECTION, inputs=c.hidden_size * c.merge_size**2, outputs=c.projection_size)


def _attention(net: Network, c: SiglipConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("attention"):
        h = net.layer_norm(x, f"{p}.layer_norm1", "input_layernorm")
        names = (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"))
        parts = [whole(f"{p}.self_attn.{name}", module, width, heads) for name, module in names]
        qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.self_attn.out_proj", "attn_dense", c.hidden_size)
        return net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)


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
