"""Config and layers that vision towers of several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.weights import Split, whole
from .decoder import plain_mlp
from .encoder import EncoderConfig
from .family import Features


@dataclass(frozen=True, kw_only=True)
class TowerConfig(EncoderConfig):
    """Fields of a tower, in addition to those of other encoders."""

    image_size: int = 1
    """Height and width of the images that positions were trained for."""
    patch_size: int = 1
    num_channels: int = 3
    projection_size: int = 1
    """Width of the language model's hidden states."""
    image_token_id: int = 0
    """Token of the language model that stands for a row of an image."""

    @property
    def patches_per_side(self) -> int:
        """Number of patches in a row of patches of an image of the trained size."""
        return self.image_size // self.patch_size

    @property
    def tokens_per_row(self) -> int | None:
        """Number of the tower's tokens for each row of the language model, if images have different sizes."""
        return None

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.patch_size > self.image_size:
            found.append(f"patch_size is {self.patch_size}; expected at most image_size {self.image_size}")
        return found


def vision_fields(model: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model's vision_config over transformers' `defaults`."""
    given = model.get("vision_config")
    given = given if isinstance(given, Mapping) else {}
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def patches_of(fields: Mapping[str, Any]) -> int:
    """Returns the number of patches of an image of the trained size, or 1 for sizes that will be refused."""
    size, patch = fields["image_size"], fields["patch_size"]
    countable = isinstance(size, int) and isinstance(patch, int) and patch > 0
    return max((size // patch) ** 2, 1) if countable else 1


def fields_of_tower(
    own: Mapping[str, Any], architecture: str, num_positions: int, text: CheckpointConfig
) -> dict[str, Any]:
    """Returns a tower's config.json without the fields that only its family has. own: from vision_fields()."""
    return {
        **own,
        "architectures": [architecture],
        "vocab_size": num_positions,
        "max_position_embeddings": num_positions,
        "projection_size": text.hidden_size,
    }


def read_tower_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Reads the fields of TowerConfig; the layers have biases."""
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "image_size": fields.integer("image_size"),
        "patch_size": fields.integer("patch_size"),
        "num_channels": fields.integer("num_channels", maximum=3, minimum=3),
        "projection_size": fields.integer("projection_size"),
        "image_token_id": fields.integer("image_token_id", minimum=0),
    }


Mlp = Callable[[Value, Value, str], Value]
"""Arguments: normalised rows, the residual stream to which it adds, and the path of the MLP."""


def given_patches(
    net: Network, c: TowerConfig, path: str, *, num_positions: int, bias: bool = True, first: str | None = None
) -> Value:
    """Declares the rows of patches with learned positions, which requests give.

    path: of the embeddings. bias: True if the convolution over patches has one. first: see Network.embed_patches().
    """
    positions = f"{path}.position_embedding"
    net.embed_patches(
        f"{path}.patch_embedding",
        positions,
        channels=c.num_channels,
        patch_size=c.patch_size,
        num_positions=num_positions,
        bias=bias,
        first=first,
    )
    # A request's embeddings replace every row; the table only gives them their width.
    return net.embedding(positions, adapted=False)


def vision_layers(net: Network, c: TowerConfig, x: Value, path: str, mlp: Mlp | None = None) -> Value:
    """Declares the layers `path` of SigLIP and CLIP: attention and an MLP, each after a layer norm.

    mlp: None: two layers, fc1 and fc2, with the config's activation.
    """
    rotary = net.no_rotation()
    for layer in net.layers():
        p = f"{path}.{layer}"
        x = _attention(net, c, x, p, rotary)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.layer_norm2", "post_layernorm")
            own = f"{p}.mlp"
            x = plain_mlp(net, c, h, x, own, ("fc1", "fc2")) if mlp is None else mlp(h, x, own)
    return x


def _attention(net: Network, c: TowerConfig, x: Value, p: str, rotary: RotaryTable) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    with net.scope("attention"):
        h = net.layer_norm(x, f"{p}.layer_norm1", "input_layernorm")
        names = (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"))
        parts = [whole(f"{p}.self_attn.{name}", module, width, heads) for name, module in names]
        qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=True)
        attended = net.attention(qkv, rotary, is_causal=False)
        dense = whole(f"{p}.self_attn.out_proj", "attn_dense", c.hidden_size)
        return net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)
