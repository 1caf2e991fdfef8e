"""Vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with the mergers that make rows of the language model.

A tower reads the patches of one image, in squares of merge_size * merge_size patches. Each patch has coordinates: row,
column, and the number of its window. A merger joins the rows of a square. Mergers are layers after those of the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import RotaryTable, Value
from ..network.ops import PatchEmbedding
from ..network.weights import Split, Tensor, TensorName, stacked, whole
from .clip import quick_mlp
from .decoder import dense_mlp, plain_mlp
from .family import GELUS, Features, ModelFamily
from .tower import TowerConfig, vision_fields

VISION: Final = "model.visual"
"""Path of the tower in the Hugging Face model."""
VISION_DECODER: Final = "model.language_model"
"""Path of the decoder in the whole model."""

# Names in the published models, in what transformers saves of Qwen2-VL and Qwen2.5-VL, and in adapters from before
# transformers 4.52.
OLDER_NAMES: Final = {
    **{f"model.{name}.": f"{VISION_DECODER}.{name}." for name in ("embed_tokens", "layers", "norm")},
    "visual.": f"{VISION}.",
}
NUM_COORDINATES: Final = 4
"""Coordinates of a patch's row: row, column, window, and none for the text after it."""
_EPSILON: Final = 1e-6
_OWN_NAMES: Final = {
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "in_chans": "in_channels",
    "spatial_patch_size": "patch_size",
}
"""Names of fields in vision_config, with those that are used here."""
_QWEN2_DEFAULTS: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 1280,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_attention_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
_QWEN2_5_DEFAULTS: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_attention_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_DEFAULTS: Final = {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""transformers' defaults of vision_config."""
_IMAGE_TOKEN_ID: Final = 151655
"""transformers' default."""


@dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(TowerConfig):
    """Fields of a tower. Its last layers are the mergers: the first one, and those of deepstack_layers."""

    merge_size: int = 1
    """A row of the language model is made from merge_size * merge_size neighbouring patches."""
    num_frames: int = 2
    """Number of equal frames of an image in the convolution over patches."""
    window_size: int = 0
    """Height and width of a window in pixels."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers whose patches attend to the whole image."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose rows are merged too: one row for each of the language model's first layers."""
    positions_per_side: int = 0
    """Height and width of the table of positions; 0: there is none."""

    @property
    def tokens_per_row(self) -> int | None:
        """Number of the patches of a square."""
        return self.merge_size**2

    @property
    def num_blocks(self) -> int:
        """Number of layers with attention."""
        return self.num_hidden_layers - 1 - len(self.deepstack_layers)

    @property
    def window_rows(self) -> int:
        """Height and width of a window in rows of the language model."""
        return self.window_size // self.merge_size // self.patch_size

    @property
    def has_windows(self) -> bool:
        """True if some layers attend only within windows."""
        return len(self.full_attention_layers) < self.num_blocks

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.head_size % 4 != 0:
            found.append(f"the heads have {self.head_size} elements; expected a multiple of 4")
        if self.has_windows and self.window_rows < 1:
            found.append(
                f"window_size is {self.window_size}; expected at least {self.merge_size * self.patch_size}, the side "
                "of a square of patches"
            )
        for name, layers in (
            ("fullatt_block_indexes", self.full_attention_layers),
            ("deepstack_visual_indexes", self.deepstack_layers),
        ):
            if any(layer >= self.num_blocks for layer in layers):
                found.append(f"{name} is {list(layers)}; expected layers below depth {self.num_blocks}")
        return found


def tower_fields(
    model: Mapping[str, Any],
    text: CheckpointConfig,
    architecture: str,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a tower's config.json, made of the model's vision_config and of the fields next to it."""
    given = model.get("vision_config")
    given = given if isinstance(given, Mapping) else {}
    renamed = {_OWN_NAMES.get(name, name): value for name, value in given.items()}
    if "embed_dim" in renamed or "mlp_ratio" in defaults:  # Qwen2-VL's own names
        renamed["out_hidden_size"] = renamed.pop("hidden_size", defaults["out_hidden_size"])
        renamed["hidden_size"] = renamed.pop("embed_dim", None)
    own = vision_fields({"vision_config": renamed}, defaults)
    ratio = own.pop("mlp_ratio", None)
    if isinstance(ratio, (int, float)) and isinstance(own["hidden_size"], int):
        own["intermediate_size"] = int(own["hidden_size"] * ratio)
    mergers = 1 + len(own.get("deepstack_visual_indexes", ()))
    depth = own["num_hidden_layers"]
    return {
        **own,
        "num_hidden_layers": depth + mergers if isinstance(depth, int) else depth,
        "architectures": [architecture],
        "rms_norm_eps": _EPSILON,
        "image_size": own["patch_size"],
        "vocab_size": own.get("num_position_embeddings", own["hidden_size"]),
        "projection_size": text.hidden_size,
        "max_position_embeddings": _MOST_PATCHES,
        "image_token_id": model.get("image_token_id", _IMAGE_TOKEN_ID),
    }


_MOST_PATCHES: Final = 1 << 20
"""Limit of an image's patches; the settings of the image processor and the language model allow fewer."""


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    projected = fields.integer("projection_size")
    stated = fields.integer("out_hidden_size", default=projected)
    if stated != projected:
        fields.problem("out_hidden_size", f"is {stated}; expected {projected}, the language model's hidden_size")
    deepstack = fields.integers("deepstack_visual_indexes") if "deepstack_visual_indexes" in fields else ()
    blocks = tuple(range(max(num_hidden_layers - 1 - len(deepstack), 0)))
    positions = fields.optional_integer("num_position_embeddings")
    side = 0 if positions is None else round(positions**0.5)
    if positions is not None and side * side != positions:
        fields.problem("num_position_embeddings", f"is {positions}; expected a square number")
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "image_size": fields.integer("image_size"),
        "patch_size": fields.integer("patch_size", maximum=1 << 10),
        "num_channels": fields.integer("in_channels", maximum=3, minimum=3),
        "projection_size": projected,
        "image_token_id": fields.integer("image_token_id", minimum=0),
        "merge_size": fields.integer("spatial_merge_size", maximum=1 << 5),
        "num_frames": fields.integer("temporal_patch_size", maximum=1 << 5),
        "window_size": fields.integer("window_size", minimum=0, default=0),
        "full_attention_layers": (
            fields.integers("fullatt_block_indexes") if "fullatt_block_indexes" in fields else blocks
        ),
        "deepstack_layers": deepstack,
        "positions_per_side": side,
    }


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> Features:
    parameters = fields.object("rope_parameters", optional=True)
    if parameters is None:
        return {"rotary_base": 10000.0}
    parameters.string("rope_type", choices=("axial",), default="axial")
    return {"rotary_base": parameters.number("rope_theta", above=True, default=10000.0)}


def _embed(net: Network, c: QwenTowerConfig, table: str, *, bias: bool) -> Value:
    """Declares the patches' convolution, which runs outside of the program, and the rows of the program.

    A request's embeddings replace every row; the `table` only gives them their width.
    """
    source = f"{VISION}.patch_embed.proj"
    shape = (c.hidden_size, c.num_channels, c.num_frames, c.patch_size, c.patch_size)
    positions = (c.positions_per_side**2, c.hidden_size)
    net.patches = PatchEmbedding(
        weight=Tensor(TensorName("patches.weight"), f"{source}.weight", shape),
        bias=Tensor(TensorName("patches.bias"), f"{source}.bias", shape[:1]) if bias else None,
        positions=(
            Tensor(TensorName("patches.positions"), f"{VISION}.pos_embed.weight", positions) if positions[0] else None
        ),
    )
    return net.embedding(table, adapted=False, num_coordinates=NUM_COORDINATES)


def _rotary(net: Network, c: QwenTowerConfig) -> RotaryTable:
    """Declares the rotation: a quarter of a head by a patch's row, a quarter by its column."""
    row, column = c.hidden_size, c.hidden_size + 1
    half = c.head_size // 4
    return net.rotary(columns=(row,) * half + (column,) * half, is_twice=True)


def _attention(net: Network, c: QwenTowerConfig, h: Value, x: Value, rotary: RotaryTable, layer: int) -> Value:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_size
    path = f"{VISION}.blocks.{layer}.attn"
    parts = stacked(f"{path}.qkv", [(module, width, heads) for module in ("attn_q", "attn_k", "attn_v")])
    qkv = net.linear(h, "attention.qkv", parts, split=Split.COLUMN, bias=True)
    window = None if layer in c.full_attention_layers else c.hidden_size + 2
    attended = net.attention(qkv, rotary, is_causal=False, window_column=window)
    dense = whole(f"{path}.proj", "attn_dense", c.hidden_size)
    return net.linear(attended, "attention.dense", [dense], split=Split.ROW, bias=True, add_to=x)


def _merged(net: Network, c: QwenTowerConfig, h: Value, names: tuple[str, str]) -> Value:
    """Declares the two linear layers of a merger for joined rows `h`."""
    joined = c.hidden_size * c.merge_size**2
    first = whole(names[0], "mlp_h_to_4h", joined)
    h = net.linear(h, "merger.fc", [first], split=Split.COLUMN, bias=True, activation=Activation.GELU)
    return net.linear(
        h, "merger.proj", [whole(names[1], "mlp_4h_to_h", c.projection_size)], split=Split.COLUMN, bias=True
    )


Norm = Callable[[Value, str, str], Value]
"""Arguments: rows, the norm's path, and its name in checkpoints."""
Mlp = Callable[[Network, QwenTowerConfig, Value, Value, str], Value]
"""Arguments: the network, its config, normalised rows, the residual stream to which it adds, and the path."""


def _declare_qwen2(net: Network, c: QwenTowerConfig, *, rms: bool, mlp: Mlp) -> None:
    """Declares a tower with one merger. rms: True for RMS norms, False for layer norms."""
    for path in (VISION_DECODER, "lm_head"):
        net.leave_to_other(path)
    norm: Norm = net.rms_norm if rms else net.layer_norm
    x = _embed(net, c, f"{VISION}.blocks.0.attn.proj", bias=False)
    rotary = _rotary(net, c)
    for layer in net.layers():
        if layer == c.num_blocks:
            h = net.join_neighbours(norm(x, f"{VISION}.merger.ln_q", "input_layernorm"), c.merge_size**2)
            merged = _merged(net, c, h, (f"{VISION}.merger.mlp.0", f"{VISION}.merger.mlp.2"))
            continue
        p = f"{VISION}.blocks.{layer}"
        with net.scope("attention"):
            x = _attention(net, c, norm(x, f"{p}.norm1", "input_layernorm"), x, rotary, layer)
        with net.scope("mlp"):
            x = mlp(net, c, norm(x, f"{p}.norm2", "post_layernorm"), x, f"{p}.mlp")
    with net.scope("head"):
        net.hidden = net.join_columns([merged])


def _declare_qwen3(net: Network, c: QwenTowerConfig) -> None:
    for path in (VISION_DECODER, "lm_head"):
        net.leave_to_other(path)
    x = _embed(net, c, f"{VISION}.pos_embed", bias=True)
    rotary = _rotary(net, c)
    joined: dict[int, Value] = {}
    merged = []
    for layer in net.layers():
        if layer >= c.num_blocks:
            merged.append(_qwen3_merger(net, c, x, joined, layer - c.num_blocks))
            continue
        p = f"{VISION}.blocks.{layer}"
        with net.scope("attention"):
            x = _attention(net, c, net.layer_norm(x, f"{p}.norm1", "input_layernorm"), x, rotary, layer)
        with net.scope("mlp"):
            h = net.layer_norm(x, f"{p}.norm2", "post_layernorm")
            x = plain_mlp(net, c, h, x, f"{p}.mlp", ("linear_fc1", "linear_fc2"))
        if layer in c.deepstack_layers:
            joined[layer] = net.join_neighbours(x, c.merge_size**2, is_stream=True)
    with net.scope("head"):
        net.hidden = net.join_columns(merged)


def _qwen3_merger(net: Network, c: QwenTowerConfig, x: Value, joined: Mapping[int, Value], number: int) -> Value:
    """Declares a merger: the first one for the last rows, others for the joined rows of a layer."""
    if number == 0:
        p = f"{VISION}.merger"
        h = net.join_neighbours(net.layer_norm(x, f"{p}.norm", "input_layernorm"), c.merge_size**2)
    else:
        p = f"{VISION}.deepstack_merger_list.{number - 1}"
        h = net.layer_norm(joined[c.deepstack_layers[number - 1]], f"{p}.norm", "input_layernorm")
    return _merged(net, c, h, (f"{p}.linear_fc1", f"{p}.linear_fc2"))


QWEN2_5_TOWER: Final = ModelFamily(
    architecture="Qwen2_5_VisionTransformerPretrainedModel",
    config_class=QwenTowerConfig,
    read_features=_read_features,
    read_rope=_read_rope,
    declare=partial(_declare_qwen2, rms=True, mlp=dense_mlp),
    activations={"silu": "silu", **GELUS},
    optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    tied_by_default=True,
    older_names=OLDER_NAMES,
    harmless_fields=frozenset({"tokens_per_second"}),
    ignored_tensors=(r"(model\.language_model|lm_head)\..*", r".*rotary_pos_emb\.inv_freq"),
)
QWEN2_TOWER: Final = replace(
    QWEN2_5_TOWER,
    architecture="Qwen2VisionTransformerPretrainedModel",
    declare=partial(_declare_qwen2, rms=False, mlp=quick_mlp),
    activations={"quick_gelu": "quick_gelu", **GELUS},
)
QWEN3_TOWER: Final = replace(
    QWEN2_5_TOWER,
    architecture="Qwen3VLVisionModel",
    declare=_declare_qwen3,
    activations=GELUS,
)
QWEN3_5_TOWER: Final = replace(
    QWEN3_TOWER,
    architecture="Qwen3_5VisionModel",
    # Heads that predict several tokens are not used.
    ignored_tensors=(*QWEN3_TOWER.ignored_tensors, r"mtp\..+"),
)
qwen2_tower_fields = partial(tower_fields, architecture=QWEN2_TOWER.architecture, defaults=_QWEN2_DEFAULTS)
qwen2_5_tower_fields = partial(tower_fields, architecture=QWEN2_5_TOWER.architecture, defaults=_QWEN2_5_DEFAULTS)
qwen3_tower_fields = partial(tower_fields, architecture=QWEN3_TOWER.architecture, defaults=_QWEN3_DEFAULTS)
qwen3_5_tower_fields = partial(
    tower_fields,
    architecture=QWEN3_5_TOWER.architecture,
    defaults={name: value for name, value in _QWEN3_DEFAULTS.items() if name != "deepstack_visual_indexes"},
)
