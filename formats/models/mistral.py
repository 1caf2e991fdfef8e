"""Mistral: no biases, and a sliding window in all layers or in none; text models and vision models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from .decoder import declare_llama_like
from .family import ModelFamily, VisionTower, sliding_window_of_all_layers
from .llava import LLAVA_DECODER, LLAVA_OLDER_NAMES, LLAVA_TOWERS

MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    read_features=sliding_window_of_all_layers,
    declare=declare_llama_like,
    optional_fields=frozenset({"head_dim"}),
    neutral_fields={"attention_bias": False, "mlp_bias": False},
)

BAMBOO = replace(
    MISTRAL,
    architecture="BambooForCausalLM",
    fill_in=lambda fields: {"hidden_act": "silu"},  # default of its code, although no model was published with it
    activations={"relu": "relu_both"},
    published_code={
        "AutoConfig": "configuration_bamboo.BambooConfig",
        "AutoModel": "modeling_bamboo.BambooModel",
        "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
    },
)
"""Bamboo, and TurboSparse's Mistral: relu(gate) * relu(up), which is called dReLU."""

MISTRAL3 = replace(
    MISTRAL,
    architecture="Mistral3ForConditionalGeneration",
    declare=partial(declare_llama_like, decoder=LLAVA_DECODER),
    older_names=LLAVA_OLDER_NAMES,
    vision=VisionTower(
        tensor_prefixes=LLAVA_TOWERS,
        fields=frozenset(
            """
            vision_config image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size
            vision_feature_layer
            """.split()  # noqa: SIM905
        ),
        text_model_types=frozenset({"mistral"}),
    ),
)
"""Mistral Small 3.1 and 3.2."""
