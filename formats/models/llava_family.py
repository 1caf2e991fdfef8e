"""LLaVA: Llama with CLIP's tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..network.network import Network
from .clip import CLIP_TOWER, tower_fields
from .decoder import declare_llama_like
from .family import VisionTower
from .llama import LLAMA
from .llava import CLIP_OLDER_NAMES, CONNECTOR_PATH, LLAVA_DECODER, LLAVA_TOWERS, TOWER_PATH
from .seeing import SeeingConfig

_LLAMA_7B: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def _declare(net: Network, c: SeeingConfig) -> None:
    if c.has_tower:
        net.leave_to_other(TOWER_PATH)
        net.leave_to_other(CONNECTOR_PATH)
    declare_llama_like(net, c, decoder=LLAVA_DECODER)


LLAVA = replace(
    LLAMA,
    architecture="LlavaForConditionalGeneration",
    config_class=SeeingConfig,
    declare=_declare,
    older_names=CLIP_OLDER_NAMES,
    vision=VisionTower(
        tensor_prefixes=LLAVA_TOWERS,
        fields=frozenset(
            """
            vision_config image_token_index image_token_id image_seq_length projector_hidden_act
            vision_feature_select_strategy vision_feature_layer multimodal_projector_bias
            """.split()
        ),
        text_model_types=frozenset({"llama"}),
        text_defaults=_LLAMA_7B,
        family=CLIP_TOWER,
        tower_fields=tower_fields,
    ),
)
