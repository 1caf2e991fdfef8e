"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, for text: Qwen 2 and 3 with three rows of positions."""

from __future__ import annotations

from functools import partial
from typing import Final

from ...common.json_fields import JsonFields
from .decoder import declare_llama_like
from .family import Features, ModelFamily, VisionTower, sliding_window_by_layer

VISION_DECODER: Final = "model.language_model"
"""Path of the decoder in the whole model."""

# Names in the published models, in what transformers saves of Qwen2-VL and Qwen2.5-VL, and in adapters from before
# transformers 4.52.
_OLDER_NAMES: Final = {
    **{f"model.{name}.": f"{VISION_DECODER}.{name}." for name in ("embed_tokens", "layers", "norm")},
    "visual.": "model.visual.",
}


def vision_of(model_type: str) -> VisionTower:
    """Returns the vision tower of a family of vision-language models."""
    return VisionTower(
        tensor_prefixes=("model.visual.",),
        fields=frozenset(
            """
            vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id
            """.split()  # noqa: SIM905
        ),
        text_model_types=frozenset({f"{model_type}_text"}),
    )


def _read_qwen2_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**sliding_window_by_layer(fields, num_hidden_layers), "attn_bias": True}


def _read_qwen3_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    attention_bias = fields.boolean("attention_bias", default=False)
    return {"attn_bias": attention_bias, "attn_dense_bias": attention_bias, "qk_layernorm": True}


QWEN2_VL, QWEN2_5_VL = (
    ModelFamily(
        architecture=architecture,
        read_features=_read_qwen2_features,
        declare=partial(declare_llama_like, decoder=VISION_DECODER),
        older_names=_OLDER_NAMES,
        vision=vision_of(model_type),
        mrope=True,
        default_rope_theta=1000000.0,
        optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
    )
    for architecture, model_type in (
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
    )
)

QWEN3_VL = ModelFamily(
    architecture="Qwen3VLForConditionalGeneration",
    read_features=_read_qwen3_features,
    declare=partial(declare_llama_like, decoder=VISION_DECODER),
    older_names=_OLDER_NAMES,
    vision=vision_of("qwen3_vl"),
    mrope=True,
    default_rope_theta=500000.0,
    optional_fields=frozenset({"num_key_value_heads"}),
    neutral_fields={"use_sliding_window": False},
)
